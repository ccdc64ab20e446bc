"""One rank of a job: its program, its environment, its process."""
