"""How groups end: aborted, left, hung, silent, cut.  Whoever waits is told why, and nothing stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import ANY_SOURCE, GroupAborted, GroupClosed, OperationTimeout, PeerLost, ProcessGroup, WaitTimeout
from shoal.errors import GroupError
from shoal.testing import no_leaks, processes, run_processes, run_threads
from shoal.testing.faults import disconnect, pause_heartbeats
from tests.support.debugger import held
from tests.support.topologies import TOPOLOGIES, topology_options
from tests.support.waiting import until

from ..support.programs import run_program
from .ranks import PATIENCE, left_behind

SIZE = 3
ENDED = "rank 1 has left without closing the group: its program has ended"


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on_threads(fn: Callable[..., Any], topology: str, *args: Any, size: int = SIZE, **how: Any) -> list[Any]:
    with no_leaks():
        return run_threads(fn, size, *args, timeout=PATIENCE, **topology_options(topology, size), **how)


# -- abort -----------------------------------------------------------------------------------------


def test_an_abort_wakes_every_waiter_of_every_rank(topology: str) -> None:
    waiting = threading.Barrier(SIZE)

    def fn(group: ProcessGroup) -> None:
        errors: list[BaseException] = []

        def wait(future: Any) -> None:
            with contextlib.suppress(GroupAborted):
                future.wait()
                raise AssertionError("it ended well")
            errors.append(future.exception())

        futures = [group.recv(None, (group.rank + 1) % SIZE, tag=tag) for tag in range(3)]
        if group.rank != 0:
            futures.append(group.all_reduce(torch.ones(100_000)))
        threads = [threading.Thread(target=wait, args=(future,)) for future in futures]
        for thread in threads:
            thread.start()
        waiting.wait(PATIENCE)
        if group.rank == 0:
            group.abort("enough of this")
        for thread in threads:
            thread.join(PATIENCE)
        assert len(errors) == len(futures)
        for error in errors:
            assert "rank 0 aborted the group: enough of this" in str(error)
        assert group.state == "aborted"
        with pytest.raises(GroupAborted):
            group.barrier()

    on_threads(fn, topology)


@pytest.mark.concurrency
def test_an_abort_in_the_middle_lets_nobody_have_a_wrong_result(topology: str) -> None:
    for seed in range(6):
        choose = random.Random(seed)
        victim, pause = choose.randrange(SIZE), choose.uniform(0.0, 0.02)

        def fn(group: ProcessGroup, victim: int = victim, pause: float = pause) -> int:
            x = group.empty(4_000_000)  # several strides of the fused pass
            right = 0
            if group.rank == victim:
                threading.Timer(pause, group.abort, ("now",)).start()
            with contextlib.suppress(GroupAborted):
                while True:
                    x.fill_(1.0)
                    group.all_reduce(x).wait()
                    assert bool((x == SIZE).all())
                    right += 1
            return right

        counts = on_threads(fn, topology)
        assert max(counts) - min(counts) <= 1


def test_who_closes_while_another_thread_aborts_says_so(topology: str) -> None:
    def fn(group: ProcessGroup) -> str:
        if group.rank == 0:
            channel_abort, closed = group._channel.abort, threading.Event()

            def abort(reason: str) -> None:
                if threading.current_thread() is aborting:
                    closed.wait(PATIENCE)
                channel_abort(reason)

            group._channel.abort = abort  # type: ignore[method-assign]
            aborting = threading.Thread(target=group.abort, args=("enough of this",))
            aborting.start()
            until(lambda: group.state == "aborted")
            group.close()
            closed.set()
            aborting.join()
            return "rank 0 aborted the group: enough of this"
        with pytest.raises(GroupAborted) as caught:
            group.barrier().wait()
        return str(caught.value)

    for told in on_threads(fn, topology):
        assert "rank 0 aborted the group: enough of this" in told


# -- leaving ---------------------------------------------------------------------------------------


def leave(group: ProcessGroup, way: str) -> str:
    """Rank 1 leaves without closing anything; the others get an error that names it."""
    if group.rank == 1:
        group.barrier().wait()
        if way == "sys.exit":
            sys.exit(3)
        if way == "exception":
            raise ValueError("a bug in the program")
        if way == "return":
            return "left"
        os._exit(9)

    def work() -> None:
        group.barrier().wait()  # rank 1 may be through, and break it here
        group.all_reduce(torch.ones(100)).wait()

    with pytest.raises(GroupError) as caught:
        work()
    state = group.state
    group.close()
    left = left_behind()
    assert left == [], left
    return f"{type(caught.value).__name__} ({state}): {caught.value}"


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("sys.exit", "GroupAborted (aborted): .*rank 1: SystemExit"),
        ("exception", "GroupAborted (aborted): .*rank 1: ValueError.'a bug in the program'"),
        ("return", "GroupClosed (broken): .*rank 1 has closed the group and left"),
        ("os._exit", "PeerLost (broken): .*rank 1 is lost"),
    ],
)
def test_a_rank_that_leaves_is_named_with_the_reason(way: str, told: str, topology: str) -> None:
    with no_leaks(), processes(leave, SIZE, way, **topology_options(topology, SIZE)) as ranks:
        outcomes = ranks.join()
    for rank in (0, 2):
        text = outcomes[rank].value
        assert text is not None, outcomes[rank].describe()
        kind, _, reason = told.partition(": .*")
        assert text.startswith(kind), text
        assert reason.replace(".'", "('") in text, text


def test_a_rank_whose_program_ends_has_not_closed_the_group(topology: str) -> None:
    """Whatever the others wait for, and also in a group that they make when the rank has left."""
    left = threading.Event()
    begun = threading.Barrier(SIZE)

    def fn(group: ProcessGroup) -> None:
        pairs = group.subgroup(range(SIZE), "pairs", scope="pair")
        group.barrier().wait()
        begun.wait(PATIENCE)  # one rank's failure would end the barrier of another that is still in it
        if group.rank == 1:
            group.world.close_at_exit(None)
            left.set()
            return
        with pytest.raises(GroupClosed) as missed:
            group.all_reduce(torch.ones(100)).wait()
        assert ENDED in str(missed.value)
        assert "What it wrote tells why" in str(missed.value)
        with pytest.raises(GroupClosed, match=ENDED):
            pairs.recv(None, 1).wait()
        pairs.close()
        assert left.wait(PATIENCE)
        late = group._subgroup([0, 1, 2], "late", None)
        with pytest.raises(GroupClosed, match="its program has ended"):
            late.barrier().wait()
        late.close()

    on_threads(fn, topology)


PROGRAM = """
import sys
import shoal
import torch

group = shoal.init()
group.barrier().wait()
if group.rank == 1:
    sys.exit(0)
try:
    group.all_reduce(torch.ones(100)).wait()
except shoal.GroupClosed as error:
    print(error)
"""


def test_a_program_that_exits_is_told_of_as_such(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    written = run_program(tmp_path / "program.py", 2, folder=tmp_path)
    assert ENDED in written[0], written


def test_closing_sends_what_was_submitted(topology: str) -> None:
    closing = threading.Event()

    def fn(group: ProcessGroup) -> None:
        if group.rank == 2:
            assert closing.wait(PATIENCE)
            for i in range(20):
                assert group.recv(None, 0, tag=i).wait().eq(float(i)).all()
            assert group.all_reduce(torch.ones(70_000)).wait().eq(3.0).all()
            return
        if group.rank == 0:
            for i in range(20):
                group.send(torch.full((1 + 5_000 * i,), float(i)), 2, tag=i)
        group.all_reduce(torch.ones(70_000))
        closing.set()

    on_threads(fn, topology)


@pytest.mark.parametrize("source", [0, ANY_SOURCE])
def test_a_message_whose_sender_left_in_its_middle_is_an_error(source: int, topology: str) -> None:
    gone = threading.Event()
    # Who closes takes its unfinished message back: a receive from anybody then waits until all have left.
    who = "rank 0" if source == 0 else "rank [02]"

    def fn(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(torch.ones(2_000_000), 1)
            group.close(timeout=0.2)
            gone.set()
        elif group.rank == 1:
            assert gone.wait(PATIENCE)
            with pytest.raises(GroupClosed, match=f"{who} has closed the group and left"):
                group.recv(torch.empty(2_000_000), source).wait(PATIENCE)

    on_threads(fn, topology)


# -- hanging ---------------------------------------------------------------------------------------


def wait_for_the_stopped(group: ProcessGroup) -> str:
    """Rank 1 is at a standstill; the others find out in time, and leave without it."""
    group.barrier().wait()
    if group.rank == 1:
        group.store.set("ready", b"")
        while True:
            time.sleep(60.0)
    group.store.get("stopped")
    unsent = group.send(torch.ones(3_000_000), 1)  # it will never be taken
    group.store.set(f"here/{group.rank}", b"")
    group.store.wait(["here/0", "here/2"])  # or the later one would be missed, too
    with pytest.raises(OperationTimeout) as caught:
        group.all_reduce(torch.ones(50_000), timeout=1.5).wait()
    assert 1 in caught.value.ranks  # the other one too, if it stood still meanwhile
    with pytest.raises(OperationTimeout):
        unsent.wait()
    assert group.state == "broken"
    before = time.monotonic()
    group.close(timeout=1.0)
    assert time.monotonic() - before < PATIENCE / 2
    left = left_behind()
    assert left == [], left
    return str(caught.value)


def test_a_rank_at_a_standstill_is_named_and_holds_up_no_end(topology: str) -> None:
    with (
        no_leaks(),
        # One that is held sends no heartbeats.
        processes(
            wait_for_the_stopped, SIZE, heartbeat_timeout=60.0, **topology_options(topology, SIZE)
        ) as ranks,
    ):
        ranks.store.wait(["ready"], PATIENCE)
        with held(ranks.pids[1]):  # one that a signal stops is given up
            ranks.store.set("stopped", b"")
            for rank in (0, 2):
                until(lambda rank=rank: not rank_alive(ranks.pids[rank]))
        ranks.kill(1)
        outcomes = ranks.join()
    texts = [outcomes[rank].value for rank in (0, 2)]
    assert all(texts), [outcome.describe() for outcome in outcomes]
    assert any("all_reduce (operation 1)" in text for text in texts), texts
    for text in texts:
        assert re.search(r"its timeout of 1\.5 s; .*ranks that do not answer at all: (0, )?1 \(", text), text
        assert "(a rank that hangs, or has not made this group under this name)" in text


def rank_alive(pid: int) -> bool:
    """Whether the process has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_closing_does_not_wait_for_a_rank_that_never_comes(topology: str) -> None:
    closed = threading.Barrier(SIZE)

    def fn(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank != 0:
            future = group.all_reduce(torch.ones(100_000))
            group.close(timeout=0.2)
            assert group.state == "closed"
            with pytest.raises(GroupError):
                future.wait()
        closed.wait(PATIENCE)
        if group.rank == 0:
            with pytest.raises(GroupClosed, match="has closed the group and left"):
                group.all_reduce(torch.ones(100_000)).wait()
            assert group.state == "broken"

    on_threads(fn, topology)


# -- silence and broken wires ----------------------------------------------------------------------


def test_a_host_that_falls_silent_is_lost() -> None:
    def fn(group: ProcessGroup) -> tuple[int, ...]:
        group.barrier().wait()
        never = group.recv(None, 1 - group.rank)
        pause_heartbeats(group, group.rank == 1)
        with pytest.raises(PeerLost) as caught:
            never.wait()
        assert group.state == "broken"
        # Rank 1 hears everything, so it hears also what rank 0 thinks of it.
        assert "rank 1 is lost: no message came from its host for" in str(caught.value)
        return caught.value.ranks

    assert on_threads(fn, "tcp", size=2, heartbeat_timeout=1.0) == [(1,), (1,)]


def wait_for_lost_host(group: ProcessGroup) -> tuple[int, ...]:
    group.barrier().wait()
    if group.rank == 1:
        group.store.set("ready", b"")
    with pytest.raises(PeerLost) as caught:
        group.recv(None, 1 - group.rank).wait()
    assert "no message came from its host for" in str(caught.value)
    return caught.value.ranks


def test_a_host_at_a_standstill_is_lost() -> None:
    with (
        no_leaks(),
        processes(wait_for_lost_host, 2, transport="tcp", heartbeat_timeout=1.0) as ranks,
    ):
        ranks.store.wait(["ready"], PATIENCE)
        ranks.stop(1)
        until(lambda: not rank_alive(ranks.pids[0]))
        ranks.kill(1)
        outcomes = ranks.join()
    assert outcomes[0].value == (1,), outcomes[0].describe()


def hold_the_interpreter(group: ProcessGroup) -> float:
    """Rank 1 holds the GIL for twice the heartbeat timeout: no thread of Python runs there."""
    group.barrier().wait()
    if group.rank == 1:
        ctypes.PyDLL(None).usleep(2_400_000)
    return float(group.all_reduce(torch.ones(1)).wait().item())


@pytest.mark.parametrize("topology", ["tcp", "hierarchical"])
def test_holding_the_interpreter_for_long_is_no_death(topology: str) -> None:
    with no_leaks():
        sums = run_processes(
            hold_the_interpreter, SIZE, heartbeat_timeout=1.2, **topology_options(topology, SIZE)
        )
    assert sums == [3.0] * SIZE


def test_a_cut_connection_is_a_loss_on_both_sides(topology: str) -> None:
    def fn(group: ProcessGroup) -> tuple[int, ...]:
        group.barrier().wait()
        never = group.recv(None, 1 - group.rank)
        group.store.set(f"ready/{group.rank}", b"")
        group.store.wait(["ready/0", "ready/1"])
        if group.rank == 0:
            disconnect(group, 1)
        with pytest.raises(PeerLost) as caught:
            never.wait()
        assert group.state == "broken"
        return caught.value.ranks

    for lost in on_threads(fn, topology, size=2):
        # Each side sees the other one go, unless it hears first whom that one misses.
        assert lost in ((0,), (1,))


# -- giving up a wait ------------------------------------------------------------------------------


def interrupted(group: ProcessGroup) -> list[str]:
    """Ctrl-C and a timeout end the waiting of rank 0, not its operation."""
    seen = []
    future = group.all_reduce(torch.ones(200_000)) if group.rank == 0 else None
    if future is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(WaitTimeout):
            future.wait(0.05)
        interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        try:
            interrupt.start()
            future.wait()
        except KeyboardInterrupt:
            seen.append(group.state)
        assert not future.done()
        group.store.set("interrupted", b"")
    else:
        group.store.get("interrupted")
        future = group.all_reduce(torch.ones(200_000))
    assert future.wait().eq(float(SIZE)).all()
    group.barrier().wait()
    return seen


def test_an_interrupt_ends_the_waiting_and_not_the_operation(topology: str) -> None:
    with no_leaks():
        assert run_processes(interrupted, SIZE, **topology_options(topology, SIZE)) == [["open"], [], []]
