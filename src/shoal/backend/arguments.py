"""Validation of a backend's options, before this process waits for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import config
from ..common.arguments import accepted_keywords, checked_count, unknown_keyword_error
from .base import Backend
from .registry import BackendFactory


def lanes(concurrency: int | None) -> int:
    """The number of lanes given by ``concurrency=`` or ``SHOAL_CONCURRENCY``."""
    return config.CONCURRENCY.get() if concurrency is None else checked_count("concurrency", concurrency)


def check_options(
    factory: BackendFactory, options: Mapping[str, Any], where: str, others: Sequence[str]
) -> None:
    """Raise UsageError if an option of a backend is unknown or its value is invalid.

    Args:
        where: the called function, for the message.
        others: the other arguments of that function.
    """
    own = accepted_keywords(factory)
    if own is not None:
        known = [name for name in own if name not in ("membership", "timeout")]
        if unknown := [name for name in options if name not in known]:
            raise unknown_keyword_error(where, unknown, [*others, *known])
    if isinstance(factory, type) and issubclass(factory, Backend):
        factory.check_options(options)
