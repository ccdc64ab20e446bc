"""Disables ``copy.copy``, ``copy.deepcopy`` and ``pickle`` for objects that own resources.

A copy would share threads, connections or memory with the original; closing or deleting the copy would close
those of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..errors import UsageError

_Class = TypeVar("_Class", bound=type)


def refuses_copies(name: str, owns: str, instead: str) -> Callable[[_Class], _Class]:
    """Decorate a class so that objects of it and of its subclasses cannot be copied or pickled.

    The error says that ``name`` (with an article) ``owns`` resources, and advises ``instead``.
    """
    words = f"{name} cannot be copied or pickled: it owns {owns}, which a copy would share. {instead}"

    def refuse(self: Any, *_: Any) -> NoReturn:
        raise UsageError(words)

    def decorate(kind: _Class) -> _Class:
        for method in ("__copy__", "__deepcopy__", "__reduce_ex__"):
            setattr(kind, method, refuse)
        return kind

    return decorate
