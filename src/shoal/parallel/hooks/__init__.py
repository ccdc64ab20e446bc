"""Communication hooks: alternatives to the all-reduce of the gradients of a bucket.

A hook is a function ``hook(state, bucket) -> Future``; ``model.register_comm_hook(state, hook)`` uses it
instead of the all-reduce.  Interface and names are those of torch's DistributedDataParallel.
``docs/comm-hooks.md`` compares the hooks.
"""

from .allreduce import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from .contract import CommHook, GradBucket
from .local_sgd import PostLocalSGDState, post_localSGD_hook
from .optimizer_overlap import (
    hook_then_optimizer,
    hook_then_optimizers_in_backward,
    take_over_optimizers_in_backward,
)
from .power_sgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from .zero_step import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "CommHook",
    "GradBucket",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_then_optimizer",
    "hook_then_optimizers_in_backward",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "take_over_optimizers_in_backward",
]
