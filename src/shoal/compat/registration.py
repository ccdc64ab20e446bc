"""Registration of the backend "shoal" with torch.distributed.

Through the entry point ``torch.backends``, torch imports this module at the end of ``import torch``, so
``torch.distributed.init_process_group("shoal")`` needs no import of shoal.  ``import shoal`` imports it
too if torch is already imported, and ``import shoal.compat`` calls :func:`register`.  It must be cheap: the
backend itself is imported when the first group is created.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..common import torch_features
from ..common.torch_release import problem, untested
from ..torch_terms import BACKEND
from .env_handler import install

logger = logging.getLogger(__name__)


def register() -> None:
    """Add "shoal" to the backends of torch.distributed.  Idempotent.

    Never raises: otherwise ``import torch`` would fail in every program of an environment with shoal.  Logs a
    warning if torch rejects the backend or the handler for ``env://``.
    """
    try:
        if message := problem():
            raise ImportError(message, name="torch")
        import torch.distributed as dist

        if not dist.is_available():
            return
        if BACKEND.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
            torch_features.keep_flight_recorder_off()
            torch_features.attach_hooks_to_groups()
    except Exception as error:
        logger.warning(
            "torch.distributed does not accept the backend %r: %s: %s", BACKEND, type(error).__name__, error
        )
        return
    try:
        install()
    except Exception as error:
        logger.warning(
            "init_process_group(%r) does not read the variables of Slurm and MPI: %s: %s",
            BACKEND, type(error).__name__, error,
        )  # fmt: skip


def called_by_torch() -> None:
    """The entry point for torch, called after the import of this module has called :func:`register`.

    ``import torch`` must succeed with every release.  If the release is not supported or not tested, shoal is
    removed from ``sys.modules``, so that the program's own ``import shoal`` repeats the check and raises or
    warns.
    """
    if problem() or untested():
        for name in [name for name in sys.modules if name.partition(".")[0] == "shoal"]:
            del sys.modules[name]


def _create(options: Any, backend_options: Any) -> Any:
    from .connect import create

    return create(options, backend_options)
