"""The backend ``nccl``: collectives of CUDA tensors by NCCL, everything else by the native backend."""
