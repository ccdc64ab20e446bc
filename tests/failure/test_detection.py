"""When a death is told: as soon as the process has died, however long the kernel takes to clear it away."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal import Agreement, PeerLost, ProcessGroup
from shoal.errors import QuorumLost
from shoal.testing import no_leaks, processes
from tests.support.debugger import held_at_its_end

from .ranks import PATIENCE

VICTIM = 1
SURVIVORS = (0, 2)
#: bytes of memory that the kernel frees page by page before it closes what the process had open
RESIDENT = 1 << 30


@contextlib.contextmanager
def readable(fd: int) -> Iterator[select.poll]:
    """Whether there is something to read, or the other end was closed; closes the descriptor."""
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        yield poll
    finally:
        os.close(fd)


def reduce_for_ever(group: ProcessGroup) -> None:
    x = torch.ones(1000)
    while True:
        group.all_reduce(x.fill_(1)).wait()
        assert x.eq(group.size).all()


def reduce_until_lost(group: ProcessGroup, idle: bool = False, pipe: str = "") -> tuple[float, str]:
    """When the death was told, on the machine's monotonic clock, and how.

    With a ``pipe`` the victim has much memory, and holds the pipe open.
    """
    if group.rank == VICTIM and pipe:
        os.open(pipe, os.O_WRONLY)
        memory = mmap.mmap(-1, RESIDENT)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, RESIDENT, mmap.PAGESIZE):
            memory[page] = 1
    group.barrier().wait()
    group.store.set(f"ready/{group.rank}", b"")
    if idle:
        group.store.wait(["dead"], PATIENCE)
    with pytest.raises(PeerLost) as caught:
        reduce_for_ever(group)
    told = time.monotonic()
    assert caught.value.ranks == (VICTIM,)
    group.store.set(f"lost/{group.rank}", b"")
    return told, str(caught.value)


@pytest.mark.concurrency
@pytest.mark.parametrize("idle", [False, True], ids=["at work", "idle"])
def test_a_death_is_told_before_the_process_has_ended(idle: bool) -> None:
    with no_leaks(), processes(reduce_until_lost, 3, idle) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
        with readable(os.pidfd_open(ranks.pids[VICTIM])) as ended, held_at_its_end(ranks.pids[VICTIM]):
            ranks.kill(VICTIM)
            ranks.store.set("dead", b"")
            ranks.store.wait([f"lost/{rank}" for rank in SURVIVORS], PATIENCE)
            assert not ended.poll(0)
        outcomes = ranks.join()
        assert outcomes[VICTIM].exitcode == -signal.SIGKILL, outcomes[VICTIM].describe()
        for rank in SURVIVORS:
            assert outcomes[rank].ok, outcomes[rank].describe()
            assert f"rank {VICTIM} is lost: its process has ended" in outcomes[rank].value[1]


@pytest.mark.stress  # beside other tests, the survivors may get a processor only when the memory is free
def test_a_death_with_much_memory_is_told_long_before_the_memory_is_freed(tmp_path: Path) -> None:
    pipe = tmp_path / "held"
    os.mkfifo(pipe)
    times = []
    for _ in range(5):  # another program may have the processors just then
        with (
            no_leaks(),
            readable(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as closed,
            processes(reduce_until_lost, 3, False, str(pipe)) as ranks,
        ):
            ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
            killed = time.monotonic()
            ranks.kill(VICTIM)
            assert closed.poll(PATIENCE * 1000)
            freed = time.monotonic() - killed
            outcomes = ranks.join()
            assert all(outcomes[rank].ok for rank in SURVIVORS), [o.describe() for o in outcomes]
            told = max(outcomes[rank].value[0] for rank in SURVIVORS) - killed
        times.append((told, freed))
        if told < freed / 2:
            return
    raise AssertionError(f"seconds until it was told, and until the pipe of the dead was closed: {times}")


def agree_alone(group: ProcessGroup) -> object:
    """What rank 0 agrees on with itself, once the others have died that it had given up."""
    group.barrier().wait()
    group.store.set(f"ready/{group.rank}", b"")
    lost: tuple[int, ...] = ()
    while lost != (1, 2):
        with pytest.raises(PeerLost) as caught:
            reduce_for_ever(group)
        lost = caught.value.ranks
    with pytest.raises(QuorumLost):
        group.agree(1, timeout=0.1).wait()  # they may live
    agreed = group.agree(5, timeout=PATIENCE)
    group.store.set("waits", b"")
    result = agreed.wait()
    group.store.set("agreed", b"")
    return result


def test_the_death_of_ranks_that_were_given_up_is_certain_before_they_have_ended() -> None:
    with no_leaks(), processes(agree_alone, 3) as ranks, contextlib.ExitStack() as stack:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
        for rank in (1, 2):
            ranks.stop(rank)
        ranks.store.wait(["waits"], PATIENCE)
        ended = [stack.enter_context(readable(os.pidfd_open(ranks.pids[rank]))) for rank in (1, 2)]
        with held_at_its_end(ranks.pids[1]), held_at_its_end(ranks.pids[2]):
            for rank in (1, 2):
                ranks.kill(rank)
            ranks.store.wait(["agreed"], PATIENCE)
            assert not any(each.poll(0) for each in ended)
        outcomes = ranks.join()
        assert outcomes[0].value == Agreement(5, (0,), (1, 2)), outcomes[0].describe()


def become_another_program(group: ProcessGroup) -> str:
    """The process lives on, and is no rank any more."""
    group.barrier().wait()
    if group.rank == VICTIM:
        os.execv("/bin/sleep", ["sleep", str(PATIENCE)])
    with pytest.raises(PeerLost) as caught:
        group.barrier().wait()
    assert caught.value.ranks == (VICTIM,)
    group.store.set(f"lost/{group.rank}", b"")
    return str(caught.value)


def test_a_rank_that_becomes_another_program_is_lost() -> None:
    with processes(become_another_program, 3) as ranks:
        ranks.store.wait([f"lost/{rank}" for rank in SURVIVORS], PATIENCE)
        ranks.kill(VICTIM)
        outcomes = ranks.join()
        assert all(outcomes[rank].ok for rank in SURVIVORS), [outcome.describe() for outcome in outcomes]
