"""The registry of backends by name.

A backend is registered by a call, or by a package through the entry point group ``shoal.backends``.  Such a
package is imported when the backend is first used::

    [project.entry-points."shoal.backends"]
    carrier-pigeon = "pigeons.shoal:PigeonBackend"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from .. import config
from ..errors import UsageError

if TYPE_CHECKING:
    from ..rendezvous import Membership
    from .base import Backend

#: The name of shoal's own backend.
NATIVE = "native"
#: The name of the backend over an MPI library.
MPI = "mpi"
#: The name of the backend over NCCL.
NCCL = "nccl"
#: The names of the backends of this package -> their modules and classes.  Not entry points, because an
#: uninstalled source tree has none.
_BUILT_IN = {
    NATIVE: ("shoal.backend.native.channel", "NativeBackend"),
    MPI: ("shoal.backend.mpi.channel", "MpiBackend"),
    NCCL: ("shoal.backend.nccl.engine", "NcclBackend"),
}
#: Names that list a backend for each device type, as in torch.distributed.
_PER_DEVICE = {"cpu:native": NATIVE, "cpu:mpi": MPI, "cpu:native,cuda:nccl": NCCL}
_ENTRY_POINT_GROUP = "shoal.backends"
#: Names of torch.distributed's backends for CPU tensors.
_TORCH_BACKENDS = ("gloo", "shoal")


class BackendFactory(Protocol):
    """A subclass of :class:`~shoal.backend.base.Backend`, or a function that returns a backend."""

    def __call__(self, membership: Membership, /, *, timeout: float, **options: Any) -> Backend: ...


_factories: dict[str, BackendFactory] = {}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Make ``shoal.init(backend=name)`` use ``factory``.

    Args:
        name: a name that is not registered; it hides an entry point of the same name.
        factory: called once per process and world group, as ``factory(membership, timeout=..., **options)``
            with the options of ``shoal.init`` that shoal itself does not define.

    Raises:
        UsageError: the name is already registered.
    """
    if name in _BUILT_IN or name in _factories:
        raise UsageError(f"a backend named {name!r} is registered already; choose another name")
    _factories[name] = factory


def unregister_backend(name: str) -> None:
    """Undo :func:`register_backend`; do nothing if the name is not registered."""
    _factories.pop(name, None)


def default_backend() -> str:
    """The name of the backend if the program names none: that of ``SHOAL_BACKEND``."""
    return config.BACKEND.get()


def backend_factory(name: str) -> BackendFactory:
    """The factory registered under ``name``.

    Raises:
        UsageError: the name is unknown; the message lists the known names.
    """
    if isinstance(name, str):
        name = _PER_DEVICE.get(",".join(sorted(name.replace(" ", "").split(","))), name)
    if name in _factories:
        return _factories[name]
    if name in _BUILT_IN:
        module, cls = _BUILT_IN[name]
        built_in: BackendFactory = getattr(import_module(module), cls)
        return built_in
    for entry in entry_points(group=_ENTRY_POINT_GROUP, name=name):
        factory: BackendFactory = entry.load()
        return factory
    source = f" ({config.BACKEND.name})" if config.BACKEND.is_set() and name == default_backend() else ""
    known = f"unknown backend {name!r}{source}; known backends: {', '.join(backend_names())}"
    if name in _TORCH_BACKENDS:
        known += f".  {NATIVE!r}, the default, replaces torch's {name}: omit backend="
    raise UsageError(known)


def backend_names() -> list[str]:
    """The sorted names of all backends, including those of entry points."""
    entries = entry_points(group=_ENTRY_POINT_GROUP)
    return sorted({*_BUILT_IN, *_factories, *(entry.name for entry in entries)})
