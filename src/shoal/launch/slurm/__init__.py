"""Slurm: the allocation of a job, and agents that srun starts."""
