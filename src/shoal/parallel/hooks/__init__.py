"""Communication hooks: other ways to reduce the gradients of a bucket.

A hook is a function ``hook(state, bucket) -> Future``; ``model.register_comm_hook(state, hook)`` puts it in
the place of the all-reduce.  The interface is that of torch's DistributedDataParallel.
"""

from .bucket import CommHook, GradBucket

__all__ = ["CommHook", "GradBucket"]
