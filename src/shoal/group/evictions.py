"""Reports of evicted ranks to the launcher, which ends their processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .. import config, failure_report
from ..backend.base import GroupSpec
from ..links import Links


def eviction_report(
    spec: GroupSpec, links: Links, meeting: str
) -> Callable[[Sequence[int], Collection[int]], None]:
    """Return a function that reports the lost ranks of a decision, given those that have failed or left.

    ``meeting``: the rendezvous of the world's ranks.
    """

    def report(lost: Sequence[int], dead: Collection[int]) -> None:
        unreachable = links.lost() if config.QUORUM.get() == "any" else ()  # they then count as failed
        evicted = [spec.ranks[rank] for rank in lost if rank not in dead or spec.ranks[rank] in unreachable]
        failure_report.evicted(evicted, meeting)

    return report
