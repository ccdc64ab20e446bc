"""Makes torch.distributed know the backend "shoal".

The entry point ``torch.backends`` has torch call :func:`register` at the end of ``import torch``, so that
``torch.distributed.init_process_group("shoal")`` needs no import at all; ``import shoal`` calls it if torch
is there already, and ``import shoal.compat`` always.  It must be cheap: the backend itself is imported when
the first group is made.
"""

from __future__ import annotations

from typing import Any

#: what ``init_process_group`` and ``new_group`` take
NAME = "shoal"


def register() -> None:
    """Add "shoal" to the backends of torch.distributed.  Any number of times."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from .connect import create

    return create(options, backend_options)
