"""Data-parallel training: one gradient reducer for every backend and device."""

from .ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
