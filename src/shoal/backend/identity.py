"""The identifier of a group, and how its members communicate.  Does not import torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .. import config
from ..common.arguments import checked_count
from ..errors import UsageError


def group_ident(label: str) -> int:
    """The 64-bit identifier of a group on the wire, derived from its unique ``label``."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


def world_ident(job: str, epoch: int, name: str) -> int:
    """The identifier of the first group of a job, which has this ``name``."""
    return group_ident(f"{job}/{epoch}/{name}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the operations of a group are executed; the same on all members.

    Attributes:
        concurrency: number of lanes.
        algorithm: one of ``config.ALGORITHMS``; see ``docs/algorithms.md``.
    """

    concurrency: int = 1
    algorithm: str = "auto"

    @classmethod
    def chosen(cls, concurrency: int | None = None, algorithm: str | None = None) -> Tuning:
        """Return what arguments or, where they are None, the environment choose; raise UsageError."""
        return cls(config.CONCURRENCY.get(), config.ALGORITHM.get()).changed(concurrency, algorithm)

    def changed(self, concurrency: int | None, algorithm: str | None) -> Tuning:
        """Return this with other values where they are not None; raise UsageError for a wrong one."""
        if algorithm is not None and algorithm not in config.ALGORITHMS:
            raise UsageError(f"algorithm={algorithm!r}: expected one of {', '.join(config.ALGORITHMS)}")
        return Tuning(
            self.concurrency if concurrency is None else checked_count("concurrency", concurrency),
            self.algorithm if algorithm is None else algorithm,
        )
