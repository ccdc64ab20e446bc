"""A store in a file, for processes that share nothing but a disk."""
