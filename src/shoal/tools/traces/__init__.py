"""``shoal trace``: merges the traces of all ranks of a job.  Nothing here imports torch."""
