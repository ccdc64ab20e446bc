"""Random collectives of real processes, in groups that are split, closed and aborted meanwhile.

A world has chapters.  In each, its ranks make a group of all and parts of it, use them in turn with several
operations in flight, and close them; in some, one is aborted.  No rank waits for another between chapters.
What happens follows from the seed and is the same on all ranks; when it happens is each rank's own.
cpp/tests/live.cc does the same to the core alone.
"""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from typing import Any

import pytest

from shoal import Future, GroupAborted, ProcessGroup
from shoal.testing import no_leaks, run_processes
from shoal.testing.conformance.cases import (
    CollectiveCase,
    all_cases,
    check_case,
    finish_case,
    part,
    start_case,
)
from shoal.testing.conformance.reference import op_of, raw
from tests.support.topologies import topology_options

pytestmark = [
    pytest.mark.concurrency,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

#: elements of a part; in bytes from nothing through what fits in a slot to several windows and messages
COUNTS = (0, 1, 1, 1, 7, 64, 64, 300, 1024, 5000, 20_000)
#: calls that a world chooses from: few enough for their references to be computed once
POOL = 150
MOODS = ("eager", "eager", "eager", "yielding", "sleepy", "one slow")

WORLDS = [
    ("shm", 2, 1), ("shm", 8, 2), ("shm", 4, 4), ("tcp", 3, 1), ("tcp", 5, 3), ("hierarchical", 4, 2),
    ("hierarchical", 8, 1),
]  # fmt: skip


def live(group: ProcessGroup, seed: int, operations: int) -> list[tuple[str, int]]:
    """At least so many operations; of each group that was not aborted, a digest of its all-reduces."""
    script = random.Random(seed)
    legal = [case for case in all_cases(0) if case.legal]
    pool = [
        CollectiveCase(case.collective, case.dtype, case.op, script.choice(COUNTS))
        for case in script.choices(legal, k=POOL)
    ]
    digests: list[tuple[str, int]] = []
    submitted = chapter = 0
    while submitted < operations:
        member = Member(group, seed * 100_000 + chapter, pool)
        submitted += member.play()
        digests += member.digests.items()
        chapter += 1
    return digests


class Member:
    """One rank in one chapter."""

    def __init__(self, world: ProcessGroup, seed: int, pool: list[CollectiveCase]) -> None:
        self.world, self.pool = world, pool
        self.script, self.own = random.Random(seed), random.Random(seed * 1009 + world.rank)
        self.mood = self.script.choice(MOODS)
        self.slow = self.script.randrange(world.size)
        self.doomed = self.script.choice(("", "", "", "whole", "part"))
        self.groups: list[ProcessGroup | None] = []
        self.calls: list[tuple[ProcessGroup, CollectiveCase, list[Future[Any]], int]] = []
        self.digests: dict[str, int] = {}
        self.condemned: ProcessGroup | None = None  # what may be aborted at any moment
        self.aborter: threading.Timer | None = None

    def play(self) -> int:
        """The whole chapter; how many operations its script had."""
        whole = self.world.subgroup(range(self.world.size))
        self.groups.append(whole)
        if self.doomed == "whole":
            self.condemned = whole
        steps = self.script.randrange(5, 60)
        moment = self.script.randrange(steps)
        submitted = 0
        for step in range(steps):
            if step == moment and self.doomed:
                self.doom()
            roll = self.script.randrange(12)
            if roll == 0 and len(self.groups) < 5:
                self.groups.append(self.divide())
            elif roll == 1 and len(self.groups) > 1:
                self.close(self.groups.pop(self.script.randrange(1, len(self.groups))))
            else:
                submitted += self.burst()
        while self.groups:
            self.close(self.groups.pop())
        self.finish(0)
        if self.aborter is not None:
            self.aborter.join()
        return submitted

    def dawdle(self) -> None:
        if self.mood == "yielding" and self.own.random() < 0.2:
            os.sched_yield()
        elif self.mood == "sleepy" and self.own.random() < 0.1:
            time.sleep(self.own.uniform(0, 0.0002))
        elif self.mood == "one slow" and self.world.rank == self.slow and self.own.random() < 0.1:
            time.sleep(self.own.uniform(0, 0.002))

    def divide(self) -> ProcessGroup | None:
        """A part of the group of all: by a split, or without a word where an abort could cut that short."""
        colors = [self.script.choice((None, 0, 0, 1)) for _ in range(self.world.size)]
        mine = colors[self.world.rank]
        whole = self.groups[0]
        if self.doomed == "whole":
            members = [rank for rank, color in enumerate(colors) if color == mine]
            return None if mine is None else self.world.subgroup(members)
        assert whole is not None
        return whole.split(mine)

    def doom(self) -> None:
        """From a thread of its own, one member aborts the group of all, or a part made for that."""
        if self.doomed == "part":
            self.condemned = self.divide()
            self.groups.append(self.condemned)
        target = self.condemned
        culprit = self.script.randrange(self.world.size)
        if target is not None and target.rank == culprit % target.size:
            self.aborter = threading.Timer(self.own.uniform(0, 0.002), target.abort, ["as the script has it"])
            self.aborter.start()

    def burst(self) -> int:
        """Several operations in random groups; those that are left are waited for later."""
        count = self.script.randint(1, 4)
        for _ in range(count):
            group = self.groups[self.script.randrange(len(self.groups))]
            case = self.pool[self.script.randrange(len(self.pool))]
            index = self.script.getrandbits(32)
            if group is None:
                continue
            self.dawdle()
            try:
                self.calls.append((group, case, self.start(group, case), index))
            except GroupAborted:
                assert group is self.condemned, group.name
        self.own.shuffle(self.calls)
        self.finish(self.own.randrange(5) if self.own.random() < 0.3 else 0)
        return count

    def start(self, group: ProcessGroup, case: CollectiveCase) -> list[Future[Any]]:
        if case.collective != "all_reduce" or self.own.random() < 0.5:
            return start_case(group, case)
        x = group.empty(case.count, dtype=case.dtype).copy_(part(case, group.rank))
        return [group.all_reduce(x, op_of(group.rank, case.op))]

    def finish(self, left: int) -> None:
        while len(self.calls) > left:
            self.dawdle()
            group, case, futures, index = self.calls.pop()
            if self.own.random() < 0.1:
                futures = [future.then(lambda done: done.value()) for future in futures]
            try:
                got = finish_case(futures)
            except GroupAborted:
                assert group is self.condemned, group.name
                continue
            check_case(case, group.rank, group.size, got)
            if case.collective == "all_reduce" and group is not self.condemned:
                digest = zlib.crc32(raw(got[0]), index)
                self.digests[group.name] = self.digests.get(group.name, 0) ^ digest

    def close(self, group: ProcessGroup | None) -> None:
        if group is None:
            return
        if self.own.random() < 0.5:
            self.finish(0)
        group.close()


def check_world(topology: str, size: int, lanes: int, seed: int, operations: int, timeout: float) -> None:
    with no_leaks():
        options = {**topology_options(topology, size), "concurrency": lanes, "timeout": timeout}
        results = run_processes(live, size, seed, operations, op_timeout=timeout / 2, **options)
    found: dict[str, set[int]] = {}
    for digests in results:
        for name, digest in digests:
            found.setdefault(name, set()).add(digest)
    different = [name for name, seen in found.items() if len(seen) > 1]
    assert not different, f"all-reduces differ between the ranks of {different}"


@pytest.mark.parametrize(("topology", "size", "lanes"), [WORLDS[i] for i in (1, 4, 5)])
def test_groups_come_and_go_under_random_collectives(topology: str, size: int, lanes: int) -> None:
    check_world(topology, size, lanes, seed=1, operations=800, timeout=240.0)


@pytest.mark.stress
@pytest.mark.parametrize(("topology", "size", "lanes"), WORLDS)
def test_a_hundred_thousand_collectives_give_right_results(topology: str, size: int, lanes: int) -> None:
    operations = 2_000 if os.environ.get("STRESS") == "short" else 15_000
    check_world(topology, size, lanes, seed=2, operations=operations, timeout=600.0)
