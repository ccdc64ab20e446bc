"""torch's rendezvous handler for ``env://``, extended by the variables of Slurm, MPICH and Open MPI.

torch's own handler needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.  If one of these is missing and
:func:`torch.distributed.init_process_group` was called with the backend "shoal", alone or for the CPU, the
extended handler connects the ranks as :func:`shoal.init` does.  It passes all other calls to torch's handler.

This module must be cheap to import, because ``import torch`` imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..torch_terms import BACKEND

_Handler = Callable[..., Iterator[Any]]

#: environment variable -> the URL parameter that replaces it, or ""
_TORCH_VARIABLES = {"RANK": "rank", "WORLD_SIZE": "world_size", "MASTER_ADDR": "", "MASTER_PORT": ""}

_CALLER = ("torch.distributed.distributed_c10d", "init_process_group")
_HANDLERS = "torch.distributed.rendezvous"


class EnvHandler:
    """A rendezvous handler for ``env://`` with torch's signature.

    Args:
        torchs: torch's own handler.
    """

    def __init__(self, torchs: _Handler) -> None:
        self._torchs = torchs

    def __call__(self, url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return an iterator whose first item is (store, rank, number of ranks)."""
        parameters = dict(parse_qsl(urlsplit(url).query))
        if not _is_complete(parameters, os.environ) and BACKEND in _backends(sys._getframe(1)):
            from .launcher_store import launch_of, met

            launch = launch_of(parameters, os.environ, _TORCH_VARIABLES)
            if launch is not None:
                return met(launch, kwargs.get("timeout"))
        return self._torchs(url, *args, **kwargs)


def install() -> None:
    """Replace torch's handler for ``env://`` by the extended one.  Idempotent.

    Raises:
        ImportError, KeyError: this release of torch stores its handlers elsewhere.
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
