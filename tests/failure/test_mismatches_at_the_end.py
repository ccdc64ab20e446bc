"""A rank that has finished what it called, and closes: it may be the one that called something else.

It hears of that when it closes, and until then the others can ask it what it called.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import CollectiveMismatch, PeerLost, ProcessGroup
from shoal.testing import no_leaks, processes, run_threads
from tests.support.topologies import TOPOLOGIES, topology_options
from tests.support.waiting import until

from .ranks import PATIENCE

SIZE = 3
ODD = 1  # the rank that calls something else


@pytest.fixture(params=TOPOLOGIES)
def on_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        with no_leaks():
            return run_threads(fn, SIZE, *args, timeout=PATIENCE, **topology_options(request.param, SIZE))

    return run


def broadcasts(group: ProcessGroup, x: torch.Tensor) -> None:
    group.broadcast(x, ODD).wait()


def is_a_leaf_of_a_reduce(group: ProcessGroup, x: torch.Tensor) -> None:
    group.reduce(x, 0).wait()


def is_a_leaf_of_a_gather(group: ProcessGroup, x: torch.Tensor) -> None:
    group.gather(x, None, 0).wait()


def scatters(group: ProcessGroup, x: torch.Tensor) -> None:
    group.scatter(torch.empty_like(x), [x] * SIZE, ODD).wait()


#: calls that may be finished before any other rank has called anything; how late the others are, in seconds
CALLS = ((broadcasts, 0.7), (is_a_leaf_of_a_reduce, 0.0), (is_a_leaf_of_a_gather, 0.7), (scatters, 0.0))


@pytest.mark.parametrize(("call", "late"), CALLS)
def test_a_rank_that_has_finished_hears_when_it_closes(
    on_ranks: Callable[..., list[str]], call: Callable[..., None], late: float
) -> None:
    def fn(group: ProcessGroup) -> str:
        group.barrier().wait()
        x = torch.ones(4)
        if group.rank != ODD:
            time.sleep(late)

        def call_and_close() -> None:
            if group.rank == ODD:
                call(group, x)
                group.close()
            else:
                group.all_reduce(x).wait()

        with pytest.raises(CollectiveMismatch) as caught:
            call_and_close()
        assert group.state == ("closed" if group.rank == ODD else "broken")
        return str(caught.value)

    for text in on_ranks(fn):
        assert "rank 0: all_reduce(float32[4], op=SUM)" in text
        assert re.search(r"rank 1: (broadcast|reduce|gather|scatter)\(float32\[4\]", text)
        assert "rank 2: all_reduce(float32[4], op=SUM)" in text


def test_the_others_of_a_subgroup_can_ask_who_has_closed_it(on_ranks: Callable[..., list[str]]) -> None:
    def fn(group: ProcessGroup) -> str:
        text = call_in(group.subgroup([0, 1])) if group.rank < 2 else ""
        group.barrier().wait()  # the other groups go on
        return text

    def call_in(part: ProcessGroup) -> str:
        def call_and_close() -> None:
            if part.rank == ODD:
                part.broadcast(torch.ones(2), ODD).wait()
                part.close()
            else:
                time.sleep(0.5)
                part.all_reduce(torch.ones(3)).wait()

        with pytest.raises(CollectiveMismatch) as caught:
            call_and_close()
        part.close()
        return str(caught.value)

    for text in on_ranks(fn)[:2]:
        assert "rank 0: all_reduce(float32[3], op=SUM)" in text
        assert "rank 1: broadcast(float32[2], root=1)" in text


def test_a_block_raises_it_unless_another_exception_leaves_the_block(
    on_ranks: Callable[..., list[str]],
) -> None:
    def fn(group: ProcessGroup, error: Exception | None) -> str:
        def block() -> None:
            if group.rank == ODD:
                group.broadcast(torch.ones(4), ODD).wait()
                if error is not None:
                    until(lambda: group.state == "broken")
                    raise error
            else:
                time.sleep(0.5)
                group.all_reduce(torch.ones(4)).wait()

        with pytest.raises((CollectiveMismatch, KeyError)) as caught, group:
            block()
        return type(caught.value).__name__

    assert on_ranks(fn, None) == ["CollectiveMismatch"] * SIZE
    assert on_ranks(fn, KeyError("its own")) == ["CollectiveMismatch", "KeyError", "CollectiveMismatch"]


def test_what_a_call_has_raised_is_not_raised_again(on_ranks: Callable[..., list[None]]) -> None:
    def fn(group: ProcessGroup) -> None:
        group.barrier().wait()
        first = group.broadcast(torch.ones(4), 0) if group.rank == ODD else group.barrier()
        with pytest.raises(CollectiveMismatch):
            first.wait()
        group.close()

    on_ranks(fn)


def test_who_closes_waits_for_those_that_have_not_finished(on_ranks: Callable[..., list[None]]) -> None:
    called = threading.Event()

    def fn(group: ProcessGroup) -> None:
        group.barrier().wait()
        x = torch.full((4,), float(group.rank))
        if group.rank == ODD:
            broadcasts(group, x)
            group.close()
            assert called.is_set()
            return
        time.sleep(0.5 if group.rank == 0 else 0.0)
        if group.rank == 0:
            called.set()
        broadcasts(group, x)
        assert x.tolist() == [1.0] * 4

    on_ranks(fn)


def test_who_closes_waits_for_nobody_that_has_called_less_and_left(
    on_ranks: Callable[..., list[None]],
) -> None:
    def fn(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == ODD:
            broadcasts(group, torch.ones(4))
        group.close()

    on_ranks(fn)


def test_who_closes_does_not_wait_beyond_its_timeout(on_ranks: Callable[..., list[None]]) -> None:
    closed = threading.Event()

    def fn(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == ODD:
            broadcasts(group, torch.ones(4))
            group.close(timeout=0.3)
            closed.set()
        else:
            assert closed.wait(PATIENCE)

    on_ranks(fn)


def close_beside_the_dead(group: ProcessGroup) -> None:
    group.barrier().wait()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == ODD:
        with contextlib.suppress(PeerLost):
            broadcasts(group, torch.ones(4))
    else:
        with pytest.raises(PeerLost):
            group.all_reduce(torch.ones(4), timeout=PATIENCE).wait()
    group.close()


def test_who_closes_does_not_wait_for_the_dead() -> None:
    with processes(close_beside_the_dead, SIZE, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    assert [outcome.exitcode for outcome in outcomes] == [None, None, -signal.SIGKILL]


PROGRAM = """
import torch, shoal
group = shoal.init()
x = torch.ones(4)
if group.rank == 1:
    group.broadcast(x, 1).wait()
else:
    try:
        group.all_reduce(x).wait()
    except shoal.CollectiveMismatch as error:
        assert "rank 1: broadcast(float32[4], root=1)" in str(error)
print("the last line of rank", group.rank)
"""


def test_a_program_that_ends_without_closing_fails_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "-n", str(SIZE), str(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for rank in range(SIZE):
        assert f"the last line of rank {rank}" in done.stdout
    assert (
        "[1] shoal.errors.CollectiveMismatch: group 'world' on rank 1 failed while it was closed"
        in done.stderr
    )
    assert "[1]   rank 2: all_reduce(float32[4], op=SUM)" in done.stderr
    assert "shoal: rank 1 failed first: exit code 1" in done.stderr
    assert done.returncode == 1
