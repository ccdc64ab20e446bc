"""Puts shoal behind torch.distributed.rpc, and takes it away again."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...errors import UsageError

#: the attributes that were replaced: an object, the name, and the value before
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Let ``torch.distributed.rpc`` work over shoal in this process.  Any number of times.

    Call it before other modules take names out of ``torch.distributed.rpc``: a class ``RRef`` that was
    imported before is torch's own.

    Raises:
        UsageError: an agent of torch's own runs.
    """
    if _replaced:
        return
    rpc: Any = import_module("torch.distributed.rpc")
    if rpc._is_current_rpc_agent_set():
        raise UsageError(
            "shoal.compat.rpc.install(): torch.distributed.rpc has an agent already; call this before "
            "init_rpc, or after shutdown"
        )
    from . import calls, lifecycle, reference, waiting

    new = {
        **calls.replacements,
        **lifecycle.replacements,
        "RRef": reference.TorchRRef,
        "PyRRef": reference.PyRRef,
    }
    for module in (rpc, rpc.api, rpc.internal, rpc.backend_registry):
        for name in new.keys() & vars(module).keys():
            _replace(module, name, new[name])
    for name, function in waiting.replacements().items():
        _replace(import_module("torch.futures"), name, function)
    _replace(import_module("torch.distributed.autograd"), "_new_context", lifecycle.no_autograd)


def uninstall() -> None:
    """Give ``torch.distributed.rpc`` back what :func:`install` has replaced.  Any number of times.

    Raises:
        UsageError: an agent runs.
    """
    if not _replaced:
        return
    from .state import state

    if state.agent is not None:
        raise UsageError(
            "shoal.compat.rpc.uninstall(): torch.distributed.rpc has an agent; call its shutdown first"
        )
    while _replaced:
        module, name, was = _replaced.pop()
        setattr(module, name, was)


def _replace(module: Any, name: str, by: Any) -> None:
    _replaced.append((module, name, getattr(module, name)))
    setattr(module, name, by)
