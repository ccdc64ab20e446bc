"""Command-line tools; each is a subcommand of ``shoal``."""
