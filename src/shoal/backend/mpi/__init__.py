"""The backend "mpi": MPI moves the data of collectives, and the native backend does everything else."""
