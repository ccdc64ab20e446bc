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

    Args:
        name: of the object, with an article.
        owns: the resources.
        instead: advice for the user, as a sentence without its full stop.
    """
    words = f"{name} cannot be copied or pickled: it owns {owns}, which a copy would share. {instead}"

    def copied(self: Any) -> NoReturn:
        raise UsageError(words)

    def deep_copied(self: Any, memo: dict[int, Any]) -> NoReturn:
        raise UsageError(words)

    def reduced(self: Any, protocol: Any) -> NoReturn:
        raise UsageError(words)

    def decorate(kind: _Class) -> _Class:
        for method, function in (
            ("__copy__", copied),
            ("__deepcopy__", deep_copied),
            ("__reduce_ex__", reduced),
        ):
            setattr(kind, method, function)
        return kind

    return decorate
