"""Makes torch.distributed know the backend "shoal".

The entry point ``torch.backends`` has torch call :func:`register` at the end of ``import torch``, so that
``torch.distributed.init_process_group("shoal")`` needs no import at all; ``import shoal`` calls it if torch
is there already, and ``import shoal.compat`` always.  It must be cheap: the backend itself is imported when
the first group is made.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

#: what ``init_process_group`` and ``new_group`` take
NAME = "shoal"


def register() -> None:
    """Add "shoal" to the backends of torch.distributed.  Any number of times.

    Never raises: ``import torch`` would fail with it in every program beside which shoal is installed, also
    in those that do not use it.  A torch that takes no backend in this way is a warning of the logger.
    """
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    except Exception as error:
        logger.warning(
            "torch.distributed does not take the backend %r: %s: %s", NAME, type(error).__name__, error
        )


def _create(options: Any, backend_options: Any) -> Any:
    from .connect import create

    return create(options, backend_options)
