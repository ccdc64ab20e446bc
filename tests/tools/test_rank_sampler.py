"""Counters of ranks that have several worlds, and of ranks on other hosts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal import ProcessGroup, rank_status
from shoal.launch.metrics.collectors import RankCollector
from shoal.rank_sampler import RankRow, RankTotals, Sampler
from shoal.rank_status import RankFinder, RankProcess
from shoal.store import PrefixStore
from shoal.testing.processes import processes, run_processes
from tests.support.waiting import until

#: a process on another host
THERE = 77


def report(
    completed: int, *, world: int = 1, received: int = 1, pid: int = THERE, rank: int = 2, alive: bool = True
) -> Any:
    """The report in a heartbeat of a rank on another host."""
    return SimpleNamespace(
        rank=rank, alive=alive, received=received * 10**9, pid=pid, world=world, completed=completed,
        bytes=10 * completed, waited=completed * 10**9, memory=0, kind="barrier", number=-1, age=-1,
        blocker=-1, waits=False,
    )  # fmt: skip


def page(*reports: Any, started: int = 1) -> Any:
    nothing = SimpleNamespace(completed=0, failed=0, bytes=0, waited=0, latencies=[0])
    return SimpleNamespace(
        started=started, written=started + 1, memory=0, ended=nothing, groups=[], remote=list(reports)
    )


def process(rank: int, *pages: Any, job: str = "j", leader: int = 100) -> RankProcess:
    return RankProcess(100 + rank, job, leader, rank, 3, "S", 0.0, 0, list(pages))


class Machine:
    """The ranks that the finders of a test return.

    Attributes:
        processes: its ranks.
        sampler: reads them.
    """

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []
        self.sampler = Sampler()

    def show(self, *found: RankProcess, rank: int = 2) -> tuple[RankRow, RankTotals]:
        """Let finders find these processes; return the sample of a rank on another host."""
        self.processes = list(found)
        (sample,) = [each for each in self.sampler.samples() if each[0].remote and each[0].rank == rank]
        return sample


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(RankFinder, "find", lambda _: machine.processes)
    return machine


def test_worlds_that_end_count_on_for_a_rank_on_another_host(machine: Machine) -> None:
    first, second = report(5), report(7, world=2, received=2)
    row, totals = machine.show(process(0, page(first), page(second, started=2)))
    assert (row.completed, row.bytes, totals.waited) == (12, 120, 12.0)
    row, totals = machine.show(process(0, page(report(8, world=2, received=3), started=2)))
    assert (row.completed, row.bytes, totals.waited) == (13, 130, 13.0)
    # No report in the third world has come yet.
    machine.processes = [process(0, page(started=3))]
    assert [each[0].rank for each in machine.sampler.samples()] == [0]
    row, after = machine.show(process(0, page(report(1, world=3, received=4), started=3)))
    assert row.completed == 14
    assert after.started == totals.started


def test_reports_that_come_to_several_ranks_of_this_host_count_once(machine: Machine) -> None:
    later = report(6, received=3)
    both = process(0, page(report(5))), process(1, page(later))
    assert machine.show(*both)[0].completed == 6
    assert machine.show(*reversed(both))[0].completed == 6
    # The rank that had the later report has ended, and the other one was stopped for a while.
    assert machine.show(both[0])[0].completed == 6
    assert machine.show(process(0, page(report(9, received=4))))[0].completed == 9


def test_a_process_that_replaces_another_one_begins_at_0(machine: Machine) -> None:
    before = machine.show(process(0, page(report(5))))[1]
    lost = page(report(5, alive=False))
    assert machine.show(process(0, lost))[0].state == "left"
    new = page(report(1, pid=78, received=9), started=9)
    row, after = machine.show(process(0, lost, new))
    assert (row.pid, row.completed, row.operations_per_s) == (78, 1, 0.0)
    assert after.started != before.started
    assert machine.show(process(0, new))[0].completed == 1


def test_of_two_jobs_of_one_name_the_same_process_is_shown_at_each_sample(machine: Machine) -> None:
    for step in range(4):
        reports = [report(5 + step, received=2 * step + 1), report(100, pid=78, received=2 * step + 2)]
        shown = reports[: step + 1]  # the other job begins later
        row, _ = machine.show(*(process(at, page(each), leader=0) for at, each in enumerate(shown)))
        assert (row.pid, row.completed) == (THERE, 5 + step)


def test_jobs_of_different_names_have_rates_of_their_own(machine: Machine) -> None:
    for step in range(2):
        machine.processes = [
            process(0, page(report(count + step, pid=count, received=step + 1)), job=job, leader=0)
            for job, count in (("a", 5), ("b", 60))
        ]
        rows = [row for row in machine.sampler.rows() if row.remote]
        assert [(row.job, row.completed) for row in rows] == [("a", 5 + step), ("b", 60 + step)]
    assert min(row.operations_per_s for row in rows) > 0


def test_no_counter_of_a_replaced_process_on_another_host_is_held(machine: Machine) -> None:
    collector = RankCollector(None)

    def operations(*found: RankProcess) -> float:
        machine.processes = list(found)
        (family,) = (each for each in collector.collect() if each.name == "shoal_operations")
        return next(each.value for each in family.samples if each.labels["rank"] == "2")

    assert operations(process(0, page(report(5)), page(report(7, world=2), started=2))) == 12
    assert operations(process(0, page(report(5)))) == 12
    assert operations(process(0, page(report(1, pid=78, received=9), started=9))) == 1
    # With another number of ranks the counters begin again, although the process is the same.
    larger = RankProcess(100, "j", 100, 0, 4, "S", 0.0, 0, [page(report(0, pid=78, received=10), started=10)])
    assert operations(larger) == 0


def use_two_worlds(group: ProcessGroup, folder: str, hosts: list[str]) -> None:
    """Have a second world from when the file "begin" exists, until "close" does."""
    group.all_reduce(torch.ones(10)).wait()
    until((Path(folder) / "begin").exists)
    with shoal.init(
        store=PrefixStore("second", group.store), rank=group.rank, size=group.size,
        host_id=hosts[group.rank], heartbeat_timeout=0.4,
    ) as second:  # fmt: skip
        for _ in range(2):
            second.all_reduce(torch.ones(10)).wait()
        (Path(folder) / f"ready{group.rank}").touch()
        until((Path(folder) / "close").exists)
    until((Path(folder) / "end").exists)


def test_operations_of_a_second_world_count_on_for_ranks_on_this_and_other_hosts(tmp_path: Path) -> None:
    hosts = ["a", "a", "b"]
    with processes(
        use_two_worlds, 3, str(tmp_path), hosts, hosts=hosts, heartbeat_timeout=0.4
    ) as ranks:  # fmt: skip
        sampler, finder = Sampler(), RankFinder()

        def completed() -> list[int]:
            rows = [row for row in sampler.rows() if row.leader == ranks.pids[0] and row.pid in ranks.pids]
            return [row.completed for row in rows]

        def pages() -> list[int]:
            return [len(each.pages) for each in finder.find() if each.pid in ranks.pids]

        until(lambda: completed() == [1, 1, 1])
        (tmp_path / "begin").touch()
        until(lambda: completed() == [3, 3, 3])
        (tmp_path / "close").touch()
        until(lambda: pages() == [1, 1, 1])
        for _ in range(3):
            assert min(completed()) >= 3
        (tmp_path / "end").touch()
        ranks.join()


def test_a_world_beside_another_one_is_found_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    list_descriptors = rank_status._memory_descriptors

    def listing(pid: int) -> Iterator[int]:
        listed.append(pid)
        return list_descriptors(pid)

    monkeypatch.setattr(rank_status, "_memory_descriptors", listing)
    with processes(use_two_worlds, 2, str(tmp_path), ["a", "a"]) as ranks:
        finder = RankFinder()

        def pages() -> list[int]:
            return [len(each.pages) for each in finder.find() if each.pid in ranks.pids]

        until(lambda: pages() == [1, 1])
        finder._search_at = math.inf
        (tmp_path / "begin").touch()
        until(lambda: pages() == [2, 2], patience=8)
        assert [
            each.worlds for found in finder.find() if found.pid in ranks.pids for each in found.pages
        ] == [2] * 4
        listed.clear()
        for _ in range(3):
            assert pages() == [2, 2]
        assert not set(ranks.pids) & set(listed)
        (tmp_path / "close").touch()
        (tmp_path / "end").touch()
        ranks.join()


def worlds_of_a_forked_child(group: ProcessGroup, folder: str) -> list[list[int]]:
    """The numbers on the pages of this process, and on those of a child with a world of its own."""

    def shown() -> list[int]:
        finder = RankFinder()
        pages = until(
            lambda: [page for each in finder.find() if each.pid == os.getpid() for page in each.pages]
        )
        return [page.worlds for page in pages]

    child = os.fork()
    if child == 0:
        try:
            with shoal.init(f"file://{folder}/store", rank=0, size=1):
                (Path(folder) / "shown").write_text(json.dumps(shown()))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return [shown(), json.loads((Path(folder) / "shown").read_text())]


def test_the_number_of_worlds_goes_on_in_a_forked_child(tmp_path: Path) -> None:
    assert run_processes(worlds_of_a_forked_child, 1, str(tmp_path)) == [[[1], [2]]]
