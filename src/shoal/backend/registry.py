"""The table of backends by name: those registered by a call, and those that packages bring.

A package brings one through the entry point group ``shoal.backends``; it is imported when somebody
first asks for it::

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

#: name of the backend that comes with shoal
NATIVE = "native"
_GROUP = "shoal.backends"
#: names that torch.distributed knows, for tensors of the CPU
_OF_TORCH = ("gloo", "mpi", "shoal")


class BackendFactory(Protocol):
    """Makes a process's backend: a subclass of :class:`~shoal.backend.base.Backend`, or a function."""

    def __call__(self, membership: Membership, /, *, timeout: float, **options: Any) -> Backend: ...


_factories: dict[str, BackendFactory] = {}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Make ``shoal.init(backend=name)`` use ``factory``.

    Args:
        name: not one that is registered already; an entry point of that name is hidden.
        factory: called once per process and world group, as ``factory(membership, timeout=..., **options)``
            with the options of ``shoal.init`` that shoal does not know itself.

    Raises:
        UsageError: the name is taken.
    """
    if name == NATIVE or name in _factories:
        raise UsageError(f"a backend named {name!r} is registered already; choose another name")
    _factories[name] = factory


def unregister_backend(name: str) -> None:
    """Take back a :func:`register_backend`; does nothing when there was none."""
    _factories.pop(name, None)


def backend_factory(name: str) -> BackendFactory:
    """The factory registered under ``name``.

    Raises:
        UsageError: nobody registered it; the message lists the names that are known.
    """
    if name in _factories:
        return _factories[name]
    if name == NATIVE:
        # Not through the entry point: a source tree that is not installed has none.
        native: BackendFactory = import_module("shoal.backend.native.channel").NativeBackend
        return native
    for entry in entry_points(group=_GROUP, name=name):
        factory: BackendFactory = entry.load()
        return factory
    known = f"unknown backend {name!r}; known are {', '.join(backend_names())}"
    if name in _OF_TORCH:
        known += f".  {NATIVE!r}, the default, takes the place of torch's {name}: leave backend= out"
    raise UsageError(known)


def backend_names() -> list[str]:
    """The names of all backends, registered or brought by a package, sorted."""
    return sorted({NATIVE, *_factories, *(entry.name for entry in entry_points(group=_GROUP))})
