"""Registration of the backend "shoal" with torch.distributed.

Through the entry point ``torch.backends``, torch imports this module at the end of ``import torch``, so
``torch.distributed.init_process_group("shoal")`` needs no import of shoal.  ``import shoal`` imports it
too if torch is already imported, and ``import shoal.compat`` calls :func:`register`.  It must be cheap: the
backend itself is imported when the first group is created.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..common import torch_features
from ..common.torch_release import problem, untested
from ..torch_terms import BACKEND

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


# -- torch's rendezvous handler for ``env://`` ---------------------------------------------------
#
# torch's own handler needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.  If one of these is missing and
# init_process_group was called with the backend "shoal", alone or for the CPU, the extended handler connects
# the ranks as shoal.init does, by the variables of Slurm, MPICH and Open MPI.  It passes all other calls to
# torch's handler.


_Handler = Callable[..., Iterator[Any]]

#: environment variable -> the URL parameter that replaces it, or ""
_TORCH_VARIABLES = {"RANK": "rank", "WORLD_SIZE": "world_size", "MASTER_ADDR": "", "MASTER_PORT": ""}

_CALLER = ("torch.distributed.distributed_c10d", "init_process_group")
_HANDLERS = "torch.distributed.rendezvous"


class EnvHandler:
    """A rendezvous handler for ``env://`` with torch's signature; ``torchs`` is torch's own handler."""

    def __init__(self, torchs: _Handler) -> None:
        self._torchs = torchs

    def __call__(self, url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return an iterator whose first item is (store, rank, number of ranks)."""
        parameters = dict(parse_qsl(urlsplit(url).query))
        if not _is_complete(parameters, os.environ) and BACKEND in _backends(sys._getframe(1)):
            from .launcher_store import launch_from_environment, rendezvous_once

            launch = launch_from_environment(parameters, os.environ, _TORCH_VARIABLES)
            if launch is not None:
                return rendezvous_once(launch, kwargs.get("timeout"))
        return self._torchs(url, *args, **kwargs)


def install() -> None:
    """Replace torch's handler for ``env://`` by the extended one.  Idempotent.

    Raises ImportError or KeyError if this release of torch stores its handlers elsewhere.
    """
    from torch.distributed.rendezvous import _rendezvous_handlers

    handler = _rendezvous_handlers["env"]
    if not isinstance(handler, EnvHandler):
        _rendezvous_handlers["env"] = EnvHandler(handler)


def _is_complete(parameters: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return whether torch's own handler has all required values."""
    return all(parameter in parameters or environ.get(name) for name, parameter in _TORCH_VARIABLES.items())


def _backends(frame: FrameType | None) -> set[str]:
    """Return the backends passed to ``init_process_group``; none if the handler has another caller.

    torch does not pass the backend to the handler, so it is read from the caller's frame.
    """
    while frame is not None and frame.f_globals.get("__name__") == _HANDLERS:
        frame = frame.f_back
    if frame is None or (frame.f_globals.get("__name__"), frame.f_code.co_name) != _CALLER:
        return set()
    backends = str(frame.f_locals.get("backend", "")).lower().split(",")
    return {each.rpartition(":")[2] for each in backends}
