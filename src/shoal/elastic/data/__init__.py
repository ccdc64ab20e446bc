"""Data loaders of a session."""
