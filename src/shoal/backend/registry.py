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

from ..errors import UsageError

if TYPE_CHECKING:
    from ..rendezvous import Membership
    from .base import Backend

#: The name of shoal's own backend.
NATIVE = "native"
_ENTRY_POINT_GROUP = "shoal.backends"
#: Names of torch.distributed's backends for CPU tensors.
_TORCH_BACKENDS = ("gloo", "mpi", "shoal")


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
    if name == NATIVE or name in _factories:
        raise UsageError(f"a backend named {name!r} is registered already; choose another name")
    _factories[name] = factory


def unregister_backend(name: str) -> None:
    """Undo :func:`register_backend`; do nothing if the name is not registered."""
    _factories.pop(name, None)


def backend_factory(name: str) -> BackendFactory:
    """The factory registered under ``name``.

    Raises:
        UsageError: the name is unknown; the message lists the known names.
    """
    if name in _factories:
        return _factories[name]
    if name == NATIVE:
        # Not through the entry point, which an uninstalled source tree does not have.
        native: BackendFactory = import_module("shoal.backend.native.channel").NativeBackend
        return native
    for entry in entry_points(group=_ENTRY_POINT_GROUP, name=name):
        factory: BackendFactory = entry.load()
        return factory
    known = f"unknown backend {name!r}; known backends: {', '.join(backend_names())}"
    if name in _TORCH_BACKENDS:
        known += f".  {NATIVE!r}, the default, replaces torch's {name}: omit backend="
    raise UsageError(known)


def backend_names() -> list[str]:
    """The sorted names of all backends, including those of entry points."""
    return sorted({NATIVE, *_factories, *(entry.name for entry in entry_points(group=_ENTRY_POINT_GROUP))})
