"""Ranks that run one function after another, as child processes and under a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shoal import ProcessGroup, RemoteError, UsageError
from shoal.testing import RankPool, no_leaks
from tests.support.waiting import until

#: starts its ranks in reverse order, with the variables of MPICH
LAUNCHER = [
    "sh", "-c",
    "for rank in 1 0; do "
    'PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=2 "$@" & done; wait',
    "sh",
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def launched() -> Iterator[RankPool]:
    with RankPool(2, launcher=LAUNCHER, env={"OF_THE_TEST": "yes"}) as pool:
        yield pool


def describe(group: ProcessGroup, amount: int) -> tuple[int, float]:
    x = torch.full((3,), float(group.rank + amount))
    return os.getpid(), group.all_reduce(x).wait().sum().item()


def die_as_rank(rank: int) -> None:
    if os.environ["RANK_OF_TEST"] == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)


def hang(group: ProcessGroup) -> None:
    if group.rank == 1:
        threading.Event().wait()


def test_one_function_after_another_runs_on_the_same_processes(pool: RankPool) -> None:
    first, second = pool.run(describe, 1), pool.run(describe, 2, transport="tcp")
    assert [pid for pid, _ in first] == [pid for pid, _ in second] == pool.pids
    assert [value for _, value in first + second] == [18.0] * 3 + [27.0] * 3
    assert os.getpid() not in pool.pids
    assert len(set(pool.pids)) == 3


def test_functions_may_be_closures(pool: RankPool) -> None:
    offset = 5
    assert pool.run(lambda group: group.rank + offset) == [5, 6, 7]


def test_the_hosts_of_ranks_can_be_chosen(pool: RankPool) -> None:
    assert pool.run(lambda group: group.local_rank, hosts=["a", "b", "a"]) == [0, 0, 1]
    with pytest.raises(UsageError, match="expected one for each of 3 ranks"):
        pool.run(describe, 1, hosts=["a"])


def test_a_group_may_have_the_first_ranks_only(pool: RankPool) -> None:
    pids = [pid for pid, _ in pool.run(describe, 0)]
    assert pool.run(describe, 1, size=2, hosts=["a", "b"]) == [(pid, 9.0) for pid in pids[:2]]
    with pytest.raises(RemoteError, match="rank 1 was still running at the deadline"):
        pool.run(hang, size=2, timeout=1.0, op_timeout=30.0)
    assert pool.pids == []
    for size in (0, 4):
        with pytest.raises(UsageError, match="expected 1 to 3, the number of processes of the pool"):
            pool.run(describe, 1, size=size)


def test_a_rank_that_raises_ends_the_others_and_the_processes_stay(pool: RankPool) -> None:
    def fail(group: ProcessGroup) -> None:
        if group.rank == 1:
            raise KeyError("a bad day")
        group.barrier().wait()

    pool.run(describe, 1)
    pids = pool.pids
    with pytest.raises(RemoteError) as caught:
        pool.run(fail)
    text = str(caught.value)
    assert text.startswith("3 of 3 ranks failed, rank 1 first")
    assert "KeyError: 'a bad day'" in text
    assert text.count("GroupAborted") >= 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert [pid for pid, _ in pool.run(describe, 1)] == pids


@pytest.mark.parametrize("value", [threading.Lock, lambda: sys.exit(3)])
def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank(pool: RankPool, value: type) -> None:
    with pytest.raises(RemoteError, match=r"cannot pickle|SystemExit: 3"):
        pool.run(lambda group: value() if group.rank == 2 else None)
    assert len(pool.run(describe, 1)) == 3


def test_an_argument_that_cannot_be_sent_is_refused(pool: RankPool) -> None:
    with pytest.raises(UsageError, match="cannot be pickled"):
        pool.run(lambda group, lock: None, threading.Lock())


def test_a_killed_rank_is_named_and_replaced(pool: RankPool) -> None:
    def die(group: ProcessGroup) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier().wait()

    before = [pid for pid, _ in pool.run(describe, 1)]
    with pytest.raises(RemoteError) as caught:
        pool.run(die)
    assert "rank 1 was ended by SIGKILL" in str(caught.value)
    assert "PeerLost" in str(caught.value)
    after = [pid for pid, _ in pool.run(describe, 1)]
    assert not {*before} & {*after}


def test_a_rank_that_ends_while_others_connect_is_named(pool: RankPool) -> None:
    class Dies:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return die_as_rank, (1,)

    pool.run(lambda group: os.environ.__setitem__("RANK_OF_TEST", str(group.rank)))
    with pytest.raises(RemoteError, match="rank 1 was ended by SIGKILL"):
        pool.run(lambda group, dies: None, Dies(), timeout=30.0)
    pool.run(describe, 1)


def test_a_process_that_ended_between_two_runs_is_replaced(pool: RankPool) -> None:
    before = [pid for pid, _ in pool.run(describe, 1)]
    os.kill(before[0], signal.SIGKILL)
    until(lambda: not psutil.pid_exists(before[0]))
    assert not {*before} & {pid for pid, _ in pool.run(describe, 1)}


def test_the_deadline_shows_the_stacks_of_late_ranks_and_replaces_them(pool: RankPool) -> None:
    before = [pid for pid, _ in pool.run(describe, 1)]
    with pytest.raises(RemoteError, match="rank 1 was still running at the deadline") as caught:
        pool.run(hang, timeout=1.0, op_timeout=30.0)
    assert "in hang" in str(caught.value)
    assert pool.pids == []
    assert not {*before} & {pid for pid, _ in pool.run(describe, 1)}


def test_prepare_runs_once_in_each_process() -> None:
    def prepare() -> None:
        torch.prepared = getattr(torch, "prepared", 0) + 1  # type: ignore[attr-defined]

    with RankPool(2, prepare=prepare) as pool:
        for _ in range(2):
            assert pool.run(lambda group: torch.prepared) == [1, 1]  # type: ignore[attr-defined]


def test_an_error_of_prepare_is_raised() -> None:
    def prepare() -> None:
        raise KeyError("nothing is prepared")

    with no_leaks(), RankPool(2, prepare=prepare) as pool:
        with pytest.raises(RemoteError, match="nothing is prepared"):
            pool.run(describe, 1)
        assert pool.pids == []


def test_nothing_is_left_behind() -> None:
    with no_leaks():
        with RankPool(2) as pool:
            pool.run(describe, 1)
        with RankPool(2) as pool, pytest.raises(RemoteError):
            pool.run(hang, timeout=0.5, op_timeout=30.0)
        with RankPool(2):
            pass  # has started nothing


def test_the_rank_is_that_of_the_launcher(launched: RankPool) -> None:
    ranks = launched.run(lambda group: (group.rank, os.environ["PMI_RANK"], os.environ["OF_THE_TEST"]))
    assert ranks == [(0, "0", "yes"), (1, "1", "yes")]
    assert launched.run(describe, 1)[0][1] == 9.0


def test_the_deadline_shows_stacks_under_a_launcher(launched: RankPool) -> None:
    launched.run(describe, 1)
    processes = [psutil.Process(pid) for pid in launched.pids]
    launcher = processes[0].parent()
    with pytest.raises(RemoteError, match="rank 1 was still running at the deadline") as caught:
        launched.run(hang, timeout=1.0, op_timeout=30.0)
    assert "in hang" in str(caught.value)
    for process in [*processes, *([launcher] if launcher is not None else [])]:
        until(lambda process=process: not process.is_running())


def test_an_ended_process_is_shown_with_the_output_of_its_launcher(launched: RankPool) -> None:
    def end(group: ProcessGroup) -> None:
        if group.rank == 1:
            os.write(2, b"these are my last words\n")
            os._exit(7)

    with pytest.raises(RemoteError) as caught:
        launched.run(end)
    assert "of rank 1 ended before the function returned" in str(caught.value)
    assert "these are my last words" in str(caught.value)


def test_a_launcher_that_starts_nothing_is_shown_with_its_output() -> None:
    with no_leaks():
        with (
            RankPool(2, launcher=["sh", "-c", "echo not enough slots; exit 3", "sh"]) as pool,
            pytest.raises(RemoteError, match="0 of 2 ranks of the pool started") as caught,
        ):
            pool.run(describe, 1)
        assert "not enough slots" in str(caught.value)
        with (
            RankPool(2, launcher=["there-is-no-such-launcher"]) as pool,
            pytest.raises(UsageError, match="cannot start the launcher 'there-is-no-such-launcher'"),
        ):
            pool.run(describe, 1)


def test_a_launcher_of_another_size_is_refused() -> None:
    launcher = ["sh", "-c", 'PMI_RANK=0 PMI_SIZE=3 MPI_LOCALNRANKS=3 exec "$@"', "sh"]
    with no_leaks(), RankPool(2, launcher=launcher) as pool, pytest.raises(UsageError, match="expected 2"):
        pool.run(describe, 1)


PROGRAM = """
import os, signal, sys
parent = os.getpid()
from tests.testing.test_pool import LAUNCHER, hang
from shoal.testing import RankPool

pools = [RankPool(2), RankPool(2, launcher=LAUNCHER)]
for pool in pools:
    pool.run(lambda group: None)
    print(*pool.pids, flush=True)
if sys.argv[1] == "killed":
    pools[0].run(lambda group: os.kill(parent, signal.SIGKILL) or hang(group))
"""


@pytest.mark.parametrize("ending", ["killed", "exits"])
def test_ranks_end_with_the_process_that_has_the_pools(tmp_path: Path, ending: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending],
        stdout=subprocess.PIPE, text=True, timeout=120, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == (-signal.SIGKILL if ending == "killed" else 0)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 4
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    # A killed process leaves the folder of multiprocessing's fork server.
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]
