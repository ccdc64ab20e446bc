"""What torch builds on torch.distributed, over shoal's backend and over Gloo."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the import itself uses torch.jit.script, which is deprecated
    import torch.distributed.optim  # noqa: F401
