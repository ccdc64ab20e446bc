"""Tools beside the library; each is a subcommand of ``shoal``."""
