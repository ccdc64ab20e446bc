"""The identifier of a group, and the number of its lanes.  Does not import torch."""

from __future__ import annotations

import hashlib

from .. import config
from ..common.arguments import checked_count


def group_ident(label: str) -> int:
    """The 64-bit identifier of a group on the wire, derived from its unique ``label``."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


def world_ident(job: str, epoch: int, name: str) -> int:
    """The identifier of the first group of a job, which has this ``name``."""
    return group_ident(f"{job}/{epoch}/{name}")


def lane_count(concurrency: int | None) -> int:
    """The number of lanes given by ``concurrency=`` or ``SHOAL_CONCURRENCY``."""
    return config.CONCURRENCY.get() if concurrency is None else checked_count("concurrency", concurrency)
