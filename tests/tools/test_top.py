"""``shoal top``: what each rank does, seen from outside."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal import ProcessGroup, rank_status
from shoal.launch.cli import invoke
from shoal.rank_sampler import RankRow, RankTotals, Sampler, late_since, wait_for_held_up
from shoal.rank_status import RankFinder, RankProcess
from shoal.testing import run_threads
from shoal.testing.processes import processes
from shoal.tools.rank_table import culprits
from tests.support.waiting import until


def wait_for_a_late_rank(group: ProcessGroup, folder: str) -> None:
    """Rank 1 calls the second operation only when there is a file; the others then wait for it."""
    group.all_reduce(torch.ones(1000)).wait()
    if group.rank == 1:
        until((Path(folder) / "go").exists)
    group.all_reduce(torch.ones(1000)).wait()


Show = Callable[..., dict[str, Any]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Iterator[Show]:
    """Run the command, and keep the ranks of these processes."""

    def show(pids: list[int]) -> dict[int, dict[str, Any]]:
        assert invoke(["top", "--once", "--json"]) in (0, 1)
        shown = json.loads(capsys.readouterr().out)
        assert shown["schema"] == "shoal.top/1"
        return {row["rank"]: row for row in shown["ranks"] if row["pid"] in pids}

    return show


def test_it_shows_who_waits_for_whom_and_ranks_that_are_stopped_or_killed(
    show: Callable[[list[int]], dict[int, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with processes(wait_for_a_late_rank, 3, str(tmp_path)) as ranks:

        def rows() -> dict[int, dict[str, Any]]:
            return show(ranks.pids)

        found = until(
            lambda: (
                (now := rows())
                and len(now) == 3
                and now[0]["waits_for"] == 1
                and min(now[0]["waiting"], now[1]["awaited"]) > 0.9
                and now
            )
        )
        assert [found[rank]["pid"] for rank in range(3)] == ranks.pids
        waiting = found[0]
        assert (waiting["state"], waiting["group"], waiting["number"]) == ("waits", "world", 1)
        assert waiting["call"] == "all_reduce(float32[1000], op=SUM)"
        assert (waiting["completed"], waiting["pending"], waiting["bytes"]) == (1, 1, 4000)
        assert (found[1]["call"], found[1]["waits_for"], found[1]["pending"]) == ("", None, 0)
        assert found[1]["state"] in ("computes", "sleeps")
        assert found[0]["awaited"] < 0.1

        culprit = culprits([msgspec.convert(row, RankRow) for row in found.values()])[0]
        assert culprit.rank == 1
        assert str(culprit).startswith("ranks 0, 2 wait for rank 1, for up to ")
        assert f"(process {ranks.pids[1]})" in str(culprit)

        # As a table.  Another test may run ranks at the same time.
        assert invoke(["top", "--once"]) == 0
        table = capsys.readouterr().out
        row = next(line for line in table.splitlines() if f" {ranks.pids[0]} " in line)
        assert row.split()[2:6] == ["waits", "all_reduce(float32[1000],", "op=SUM)", "#1"]

        # As a check, of the jobs of all tests that run now.
        time.sleep(1.0)
        assert invoke(["doctor", "--job", "default", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["findings"]
        facts = {
            each["fact"]: each["advice"] for each in found if f"(process {ranks.pids[1]})" in each["fact"]
        }
        ((fact, advice),) = facts.items()
        assert fact.startswith("ranks 0, 2 wait for rank 1, for up to ")
        assert advice == f"show where: py-spy dump --pid {ranks.pids[1]}"

        ranks.stop(1)
        assert rows()[1]["state"] == "stopped"
        ranks.kill(1)
        assert 1 not in rows()
        ranks.join()
        assert rows() == {}


def test_counters_of_closed_groups_count_for_their_rank() -> None:
    def rank(group: ProcessGroup) -> RankRow:
        sampler = Sampler("threads")

        def mine() -> RankRow:
            own = [each for each in sampler.rows() if each.pid == os.getpid() and each.size == 2]
            return next(each for each in own if each.rank == group.rank)

        with group.split(0, group.rank) as half:
            for _ in range(50):
                half.all_reduce(torch.ones(3)).wait()
            until(lambda: mine().completed >= 50)
        group.all_reduce(torch.ones(3)).wait()
        last = until(lambda: (row := mine()).completed >= 51 and row)
        assert last.p50_s is not None
        return last

    for row in run_threads(rank, 2):
        assert row.bytes >= 50 * 12 + 12


def test_without_ranks_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["top", "--once", "--job", "no such job"]) == 1
    assert capsys.readouterr().out == "no rank of shoal runs on this machine that you may see\n"
    assert invoke(["top", "--once", "--json", "--job", "no such job"]) == 1
    assert json.loads(capsys.readouterr().out) == {"schema": "shoal.top/1", "ranks": [], "causes": []}
    assert invoke(["top", "--json"]) == 2
    assert "--json needs --once" in capsys.readouterr().err
    assert invoke(["top", "--interval", "nan"]) == 2
    assert "'nan' is not a finite number" in capsys.readouterr().err


def test_ranks_on_other_hosts_are_shown_by_what_their_heartbeats_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is alone on its host as far as the finder knows."""
    shown = threading.Event()
    begun = time.monotonic_ns()

    def rank(group: ProcessGroup) -> list[RankRow]:
        group.all_reduce(torch.ones(10)).wait()
        if group.rank == 2:
            shown.wait(60)
        future = group.all_reduce(torch.ones(10))
        if group.rank != 0:
            future.wait()
            return []
        find = RankFinder.find

        def only_rank_0(self: RankFinder) -> list[RankProcess]:
            here = [each for each in find(self) if each.pid == os.getpid() and each.size == 3]
            return [each for each in here if each.rank == 0 and each.started > begun]

        monkeypatch.setattr(RankFinder, "find", only_rank_0)
        sampler = Sampler("threads")
        try:
            # A report may be older than the second operation.
            expected = [(2, 1, 1), (2, 1, 1), (None, None, 1)]
            return until(
                lambda: (
                    (rows := sampler.rows())
                    and [(each.waits_for, each.number, each.completed) for each in rows] == expected
                    and (rows[1].age_s or 0) > 1.0
                    and rows
                )
            )
        finally:
            shown.set()
            future.wait()

    rows = run_threads(rank, 3, hosts=("a", "b", "c"), heartbeat_timeout=0.4)[0]
    assert [(row.rank, row.remote) for row in rows] == [(0, False), (1, True), (2, True)]
    assert (rows[1].state, rows[1].call, rows[1].number, rows[1].waits_for) == ("waits", "all_reduce", 1, 2)
    assert (rows[1].completed, rows[1].bytes, rows[1].pid) == (1, 40, os.getpid())
    assert (rows[2].state, rows[2].call, rows[2].age_s, rows[2].waits_for) == ("runs", "", None, None)
    assert [str(each) for each in culprits(rows)] == [
        f"ranks 0, 1 wait for rank 2, for up to {max(row.age_s or 0 for row in rows):.1f} s; "
        "it runs outside of shoal, on another host"
    ]


def rows_of_threads(size: int, begun: int) -> dict[int, RankRow]:
    """The rows of the ranks of this process that were started since; of no other ones with the same ranks."""
    started = [(row, totals.started) for row, totals in Sampler("threads").samples() if not row.remote]
    mine = [row for row, at in started if at > begun and row.pid == os.getpid() and row.size == size]
    assert len({row.rank for row in mine}) == len(mine)
    return {row.rank: row for row in mine}


@pytest.mark.parametrize("hosts", [("a",) * 4, ("a", "a", "a", "b")], ids=["one host", "two hosts"])
def test_groups_with_connections_of_their_own_have_the_ranks_of_the_world(hosts: tuple[str, ...]) -> None:
    shown = threading.Event()
    begun = time.monotonic_ns()

    def rank(group: ProcessGroup) -> int:
        part = group.split(0 if group.rank < 2 else 1, key=-group.rank, transport="tcp")
        assert part is not None
        with part:
            part.all_reduce(torch.ones(10)).wait()
            if group.rank == 2:
                shown.wait(60)
            future = part.all_reduce(torch.ones(10))
            if group.rank == 3:

                def waits() -> bool:
                    row = rows_of_threads(4, begun).get(3)
                    return row is not None and row.waits_for == 2 and row.completed == 2

                try:
                    until(waits)
                finally:
                    shown.set()
            future.wait()
        group.barrier().wait()
        totals = group.world.links.backend.totals()
        assert totals is not None
        if group.rank == 3:
            assert totals.late[0].rank == 2
            assert totals.waited_s > 0.0
            until(lambda: [row.completed for row in rows_of_threads(4, begun).values()] == [4, 4, 4, 4])
        group.barrier().wait()
        return totals.completed

    assert run_threads(rank, 4, hosts=hosts, heartbeat_timeout=1.0) == [4, 4, 4, 4]
    assert shown.is_set()


def test_several_worlds_of_a_process_are_one_row() -> None:
    begun = time.monotonic_ns()

    def rank(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(10)).wait()
        if group.rank == 0:

            def inner(second: ProcessGroup) -> None:
                second.all_reduce(torch.ones(10)).wait()
                second.barrier().wait()
                if second.rank == 0:
                    until(lambda: [row.completed for row in rows_of_threads(3, begun).values()] == [3, 3, 3])
                second.barrier().wait()

            run_threads(inner, 3)
        group.barrier().wait()

    run_threads(rank, 3)


def test_a_rank_on_another_host_that_has_left_one_of_two_worlds_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "_SEARCH_INTERVAL_S", 0.0)
    find = RankFinder.find

    def only_rank_0(self: RankFinder) -> list[RankProcess]:
        return [each for each in find(self) if (each.pid, each.rank, each.size) == (os.getpid(), 0, 2)]

    monkeypatch.setattr(RankFinder, "find", only_rank_0)
    sampler, reported, shown = Sampler("threads"), threading.Event(), threading.Event()

    def states() -> set[str]:
        found = {row.rank: row for row in sampler.rows() if row.remote}
        return {found[1].state} if 1 in found and found[1].completed else set()

    def inner(second: ProcessGroup) -> None:
        second.barrier().wait()
        if second.rank == 0:
            try:
                until(lambda: states() == {"runs"}, states)
            finally:
                shown.set()
        shown.wait(60)

    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == 1:
            reported.wait(60)
        else:
            until(states)
            reported.set()
            until(lambda: states() == {"left"})
            run_threads(inner, 2, hosts=("a", "b"), heartbeat_timeout=0.4)

    run_threads(rank, 2, hosts=("a", "b"), heartbeat_timeout=0.4)


def test_a_world_that_replaces_another_one_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "_SEARCH_INTERVAL_S", 0.0)
    sampler = Sampler("threads")

    def mine() -> int:
        return sum(row.pid == os.getpid() and row.size == 3 for row in sampler.rows())

    def rank(group: ProcessGroup) -> None:
        if group.rank == 0:
            until(lambda: mine() == 3)
            sampler._finder._search_at = math.inf
        group.barrier().wait()

    run_threads(rank, 3)
    assert mine() == 0
    with contextlib.ExitStack() as files:
        for _ in range(20):  # the memory of the next ones has other descriptors
            files.enter_context(open(os.devnull))
        run_threads(rank, 3)


def row(rank: int, waits_for: int | None = None, state: str = "") -> RankRow:
    waits = waits_for is not None
    return RankRow(
        job="j", leader=100, rank=rank, size=4, pid=100 + rank, remote=False,
        state=state or ("waits" if waits else "computes"), group="world", call="barrier()" if waits else "",
        number=7 if waits else None, age_s=1.0 + rank if waits else None, waits_for=waits_for, pending=1,
        completed=0, failed=0, bytes=0, operations_per_s=0.0, bytes_per_s=0.0, waiting=0.0, awaited=0.0,
        p50_s=None, p99_s=None, cpu=0.0, memory=0, shared_memory=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [row(0, 1), row(1, 2), row(2)],
            "ranks 0, 1 wait for rank 2, for up to 2.0 s; it computes, outside of shoal (process 102)",
        ),
        (
            [row(0, 1), row(1, 2), row(2, 1)],
            "ranks 1, 2 wait for one another, for up to 3.0 s: 1 -> 2 -> 1 "
            "(rank 2 in barrier(), rank 1 in barrier())",
        ),
        (
            [row(0, 3)],
            "rank 0 waits for rank 3, for up to 1.0 s; it is on no host that this one sees, or has ended",
        ),
        (
            [row(0, 1), row(1, 0, "stopped")],
            "rank 0 waits for rank 1, for up to 1.0 s; it is stopped by a signal (process 101)",
        ),
    ],
    ids=["a chain", "a circle", "one that is not there", "one that was stopped while it waited"],
)
def test_the_rank_that_a_chain_of_waits_ends_at_is_named(rows: list[RankRow], text: str) -> None:
    assert text in " | ".join(map(str, culprits(rows)))


def test_escapes_for_the_terminal_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(0, 1), row(1, 0)]
    for each in rows:
        each.job = each.group = each.call = "\x1b[2J\x07"
    monkeypatch.setattr(Sampler, "rows", lambda _: rows)
    assert invoke(["top", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("rank 0 in ?[2J?)" in line for line in lines)
    assert not [line for line in lines if not line.isprintable()]


def test_nobody_is_named_for_short_waits() -> None:
    assert culprits([row(0, 1), row(1)], least_s=1.5) == []
    remote = msgspec.structs.replace(row(0, 1), remote=True, age_s=0.9)
    assert culprits([remote, row(1)]) == []


def own_row(sampler: Sampler, group: ProcessGroup) -> tuple[RankRow, RankTotals]:
    """The sample of this rank, among those of all threads of this process, also of earlier tests."""
    own = [
        each
        for each in sampler.samples()
        if (each[0].pid, each[0].size, each[0].rank) == (os.getpid(), group.size, group.rank)
    ]
    return max(own, key=lambda each: each[1].started)


def test_a_group_beyond_the_places_of_the_page_is_shown_and_counted() -> None:
    shown = threading.Event()

    def rank(group: ProcessGroup) -> None:
        sampler = Sampler("threads")
        parts = [group.split(0) for _ in range(40)]
        for part in parts:
            part.all_reduce(torch.ones(3)).wait()
        if group.rank == 0:
            completed = group.stats().completed + 40
            future = parts[-1].all_reduce(torch.ones(3))
            expected = (1, parts[-1].name[:63], completed, 1)
            # The page may be older than the operation.
            try:
                until(
                    lambda: (
                        (now := own_row(sampler, group)[0])
                        and (now.waits_for, now.group, now.completed, now.pending) == expected
                    )
                )
            finally:
                shown.set()
            future.wait()
        else:
            shown.wait(60)
            parts[-1].all_reduce(torch.ones(3)).wait()
        for part in parts:
            part.close()

    run_threads(rank, 2)


def test_a_receive_for_which_no_thread_waits_is_not_shown() -> None:
    shown = threading.Event()

    def rank(group: ProcessGroup) -> None:
        if group.rank == 1:
            shown.wait(60)
            group.send(torch.ones(3), 0).wait()
            return
        sampler = Sampler("threads")
        future = group.recv(torch.empty(3), 1)
        found = until(lambda: (now := own_row(sampler, group)[0]).pending and now)
        assert (found.waits_for, found.call) == (None, "")
        waiter = threading.Thread(target=future.wait)
        waiter.start()
        assert until(lambda: own_row(sampler, group)[0].waits_for == 1)
        shown.set()
        waiter.join(60)

    run_threads(rank, 2)


def test_operations_that_wait_for_their_turn_do_not_count_as_waiting() -> None:
    """Rank 0 has submitted six, of which only the first one waits."""

    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == 1:
            for _ in range(6):
                time.sleep(0.1)
                group.all_reduce(torch.ones(3)).wait()
            return
        begun = time.monotonic()
        sampler = Sampler("threads")
        before = own_row(sampler, group)[1]
        futures = [group.all_reduce(torch.ones(3)) for _ in range(6)]
        while not futures[-1].done():
            waited = own_row(sampler, group)[1].waited - before.waited
            assert waited <= time.monotonic() - begun
        assert waited > 0.2
        assert group.stats().waited_s > 0.5

    run_threads(rank, 2)


def test_a_rank_that_needs_data_waits_only_for_one_that_is_held_up() -> None:
    rows = [row(0, state="moves"), row(1, state="moves"), row(2, state="stopped"), row(3)]
    wait_for_held_up(rows, {0: 2, 1: 3})
    assert [(each.state, each.waits_for) for each in rows[:2]] == [("waits", 2), ("moves", None)]


def test_a_rank_that_is_new_among_the_latest_counts_from_the_next_sample_on() -> None:
    full = {(7, rank): 1.0 for rank in range(16)}
    before = RankTotals(0, 0.0, 0, 0, 0.0, 0.0, full, ())
    now = RankTotals(0, 0.0, 0, 0, 0.0, 0.0, {**full, (7, 3): 1.5, (7, 20): 2.0, (8, 1): 0.25}, ())
    found = dict(late_since(before, now))
    assert (found[3], found[1]) == (0.5, 0.25)
    assert 20 not in found


def test_a_pipe_with_the_name_of_a_page_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would block whoever opens it."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(rank_status, "_MEMORY", str(tmp_path / "pipe"))
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)):
        assert RankFinder().find() == []


def test_a_page_with_any_content_is_refused_or_within_its_limits(tmp_path: Path) -> None:
    """Another process writes the page, so whoever reads it must expect anything."""
    from shoal._core import latency_quantile, read_status

    def rank(group: ProcessGroup) -> bytes:
        group.all_reduce(torch.ones(3)).wait()
        return until(lambda: own_page(group))

    def own_page(group: ProcessGroup) -> bytes:
        for each in os.listdir("/proc/self/fd"):
            try:
                with open(f"/proc/self/fd/{each}", "rb") as file:
                    if os.readlink(f"/proc/self/fd/{each}") != "/memfd:shoal (deleted)":
                        continue
                    status = read_status(file.fileno())
                    if status and status.rank == 0 and status.groups and status.job == "threads":
                        return file.read(1 << 18)
            except OSError:
                continue
        return b""

    memory = run_threads(rank, 1)[0]
    copy = tmp_path / "memory"

    def read(content: bytes) -> Any:
        copy.write_bytes(content)
        with copy.open("rb") as file:
            return read_status(file.fileno())

    assert read(memory).job == "threads"
    for empty in (b"", memory[:8], memory[:100_000], bytes(len(memory))):
        assert read(empty) is None
    generator = torch.Generator().manual_seed(1)
    begin = int.from_bytes(memory[8:16], "little")
    for _ in range(300):
        wrong = bytearray(memory)
        for _ in range(20):
            at = begin + int(torch.randint(4, 4000, (), generator=generator)) // 4 * 4
            wrong[at : at + 4] = os.urandom(4)
        status = read(bytes(wrong))
        if status is None:
            continue
        assert 0 <= status.rank < status.size
        for group in status.groups:
            assert 0 <= group.rank < group.size
            assert group.call is None or group.call.blocker < status.size
            assert all(0 <= late.rank < status.size for late in group.statistics.late)
        counts = [status.ended.latencies, *(group.statistics.latencies for group in status.groups)]
        assert latency_quantile([sum(column) for column in zip(*counts, strict=True)], 0.5) != 0
