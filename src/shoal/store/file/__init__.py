"""A store in a file, for processes that share a disk and nothing else."""
