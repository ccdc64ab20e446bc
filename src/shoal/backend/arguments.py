"""Checks of the options of a backend, before this process waits for any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import config
from ..common.keywords import checked_count, misspelt, taken
from .base import Backend
from .registry import BackendFactory


def lanes(concurrency: int | None) -> int:
    """The number of lanes that ``concurrency=`` or ``SHOAL_CONCURRENCY`` asks for."""
    return config.CONCURRENCY.get() if concurrency is None else checked_count("concurrency", concurrency)


def check_options(
    factory: BackendFactory, options: Mapping[str, Any], where: str, others: Sequence[str]
) -> None:
    """Refuse options that a backend does not take, by name or by value.

    Args:
        where: the function that was given them, for the message.
        others: what it takes beside them.

    Raises:
        UsageError: naming the option that is meant, if one is near.
    """
    own = taken(factory)
    if own is not None:
        known = [name for name in own if name not in ("membership", "timeout")]
        if unknown := [name for name in options if name not in known]:
            raise misspelt(where, unknown, [*others, *known])
    if isinstance(factory, type) and issubclass(factory, Backend):
        factory.check_options(options)
