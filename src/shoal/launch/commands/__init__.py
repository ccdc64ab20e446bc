"""The subcommands of ``shoal``."""
