"""Groups of pairs: what goes wrong between two ranks ends what these two exchange, and nothing else."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shoal import (
    CollectiveMismatch,
    Future,
    GroupAborted,
    OperationTimeout,
    PeerLost,
    ProcessGroup,
    UnsupportedOperation,
    UsageError,
)
from shoal.errors import OperationCancelled
from shoal.future import wait_all
from shoal.testing import no_leaks, processes, run_threads

from .ranks import PATIENCE, left_behind

PROMISE = 10.0
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
#: elements: in one frame, in one frame that waits for room, in several
SIZES = (3, 50_000, 700_000)


def in_pairs(fn: Callable[[ProcessGroup], Any], size: int = 2, transport: str = "shm") -> list[Any]:
    """``fn`` on every rank of a group of pairs, which must be whole afterwards."""

    def rank(group: ProcessGroup) -> Any:
        with group.subgroup(range(size), scope="pair") as pairs:
            value = fn(pairs)
            meet(pairs)
            assert pairs.state == "open"
        return value

    return run_threads(rank, size, transport=transport, timeout=PATIENCE)


def meet(group: ProcessGroup) -> None:
    """Everything that the others sent before has arrived."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [group.send(torch.ones(1), rank, tag=99) for rank in others]
    wait_all([group.recv(None, rank, tag=99) for rank in others])
    wait_all(sends)


# -- a death ---------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a survivor saw; times on the machine's monotonic clock."""

    ranks: list[tuple[int, ...]] = field(default_factory=list)
    at: float = 0.0
    left: list[str] = field(default_factory=list)


def exchange_while_one_dies(group: ProcessGroup, victim: int) -> Seen:
    """Messages with all others in rounds, until every survivor has seen the death and ten rounds more."""
    with group.subgroup(range(group.size), scope="pair") as pairs:
        seen = exchange(pairs, victim, lambda: group.store.set(f"ready/{group.rank}", b""))
        assert pairs.state == "open"
    group.close()
    seen.left = left_behind()
    return seen


def exchange(pairs: ProcessGroup, victim: int, ready: Callable[[], None]) -> Seen:
    me, seen = pairs.rank, Seen()
    others = [rank for rank in range(pairs.size) if rank not in (me, victim)]
    doomed: list[Future[Any]] = []
    if me != victim:
        doomed = [
            pairs.recv(None, victim, tag=100),
            pairs.recv(torch.empty(SIZES[-1]), victim, tag=101),
            pairs.send(torch.ones(SIZES[-1]), victim, tag=102),
        ]
    anybody = pairs.recv(None, tag=103)
    if me == victim:
        doomed = [pairs.send(torch.ones(SIZES[-1]), rank, tag=104) for rank in others]
        ready()
        signal.pause()
        raise AssertionError(f"a signal that does not kill, {doomed}")
    # Every rank tells for how many rounds it has known of the death, and all stop after the same round: what
    # they told in it decides.
    round_, known, told = 0, 0, [0]
    while min(told) < 10:
        x = torch.full((SIZES[round_ % 3],), float(round_))
        x[0] = known
        futures: list[Future[Any]] = [pairs.send(x, rank, tag=round_ % 5) for rank in others]
        received = [pairs.recv(None, rank, tag=round_ % 5) for rank in others]
        told = [known]
        for future in received:
            y = future.wait(PATIENCE)
            told.append(int(y[0]))
            assert len(y) == len(x)
            assert bool((y[1:] == round_).all())
        wait_all(futures)
        if known:
            known += 1
        elif all(future.done() for future in doomed):
            known, seen.at = 1, time.monotonic()
        if round_ == 20:
            ready()
        round_ += 1
    for future in (*doomed, pairs.send(torch.ones(1), victim), pairs.recv(None, victim)):
        with pytest.raises(PeerLost, match=f"rank {victim} is lost: ") as caught:
            future.wait(PATIENCE)
        seen.ranks.append(caught.value.ranks)
    # A receive from anybody outlives one of them.
    meet_again = [pairs.send(torch.tensor([7.0]), rank, tag=103) for rank in others]
    assert anybody.wait(PATIENCE).tolist() == [7.0]
    wait_all(meet_again)
    for _ in range(len(others) - 1):
        assert pairs.recv(None, tag=103).wait(PATIENCE).tolist() == [7.0]
    return seen


@TRANSPORTS
def test_the_death_of_one_leaves_the_messages_of_the_others_untouched(transport: str) -> None:
    victim = 2
    with no_leaks(), processes(exchange_while_one_dies, 4, victim, transport=transport) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(4)], PATIENCE)
        killed_at = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.join()
        assert outcomes[victim].exitcode == -signal.SIGKILL, outcomes[victim].describe()
        for outcome in outcomes:
            if outcome.rank == victim:
                continue
            seen = outcome.value
            assert isinstance(seen, Seen), outcome.describe()
            assert seen.ranks == [(victim,)] * 5
            assert seen.at - killed_at < PROMISE, f"noticed after {seen.at - killed_at:.3f} s"
            assert seen.left == []


@TRANSPORTS
def test_a_receive_from_anybody_ends_when_nobody_is_left(transport: str) -> None:
    both = threading.Barrier(2)

    def rank(group: ProcessGroup) -> tuple[int, ...]:
        with group.subgroup([0, 1], scope="pair") as pairs:
            waiting = pairs.recv(None)
            both.wait(PATIENCE)
            if group.rank == 0:
                group._backend.disconnect(1)  # type: ignore[attr-defined]
            with pytest.raises(PeerLost) as caught:
                waiting.wait(PATIENCE)
            assert pairs.state == "open"
            both.wait(PATIENCE)
        return caught.value.ranks

    assert run_threads(rank, 2, transport=transport, timeout=PATIENCE) == [(1,), (0,)]


# -- what breaks nothing but itself ----------------------------------------------------------------


@TRANSPORTS
def test_a_receive_that_times_out_is_all_that_ends(transport: str) -> None:
    def rank(pairs: ProcessGroup) -> None:
        if pairs.rank == 0:
            with pytest.raises(
                OperationTimeout, match=r"^recv from rank 1 .*: no matching message came"
            ) as late:
                pairs.recv(None, 1, timeout=0.05).wait(PATIENCE)
            assert late.value.ranks == (1,)

    in_pairs(rank, transport=transport)


@TRANSPORTS
def test_a_send_that_times_out_takes_its_message_back(transport: str) -> None:
    def rank(pairs: ProcessGroup) -> None:
        if pairs.rank == 0:
            with pytest.raises(OperationTimeout, match="took no notice"):
                pairs.send(torch.zeros(SIZES[-1]), 1, timeout=0.05).wait(PATIENCE)
            meet(pairs)
            pairs.send(torch.ones(SIZES[-1]), 1).wait(PATIENCE)
        else:
            meet(pairs)
            assert bool((pairs.recv(None, 0).wait(PATIENCE) == 1).all())

    in_pairs(rank, transport=transport)


@TRANSPORTS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("early", [True, False])
def test_a_message_that_does_not_fit_fails_its_receiver_alone(transport: str, size: int, early: bool) -> None:
    def rank(pairs: ProcessGroup) -> None:
        wrong = (torch.empty(size + 1), torch.empty(size, dtype=torch.int32))
        if pairs.rank == 0:
            receives = [] if early else [pairs.recv(x, 1) for x in wrong]
            meet(pairs)
            receives = receives or [pairs.recv(x, 1) for x in wrong]
            for future in receives:
                with pytest.raises(CollectiveMismatch, match="does not fit its receiver"):
                    future.wait(PATIENCE)
            assert bool((pairs.recv(None, 1).wait(PATIENCE) == 2).all())
        else:
            sends = [pairs.send(torch.ones(size), 0) for _ in wrong] if early else []
            meet(pairs)
            sends = sends or [pairs.send(torch.ones(size), 0) for _ in wrong]
            wait_all([*sends, pairs.send(torch.full((size,), 2.0), 0)])

    in_pairs(rank, transport=transport)


def test_collectives_are_refused_in_words() -> None:
    def rank(pairs: ProcessGroup) -> None:
        with pytest.raises(UnsupportedOperation, match=r"all_reduce .*scope=.pair..*scope=.all."):
            pairs.all_reduce(torch.ones(1))
        with pytest.raises(UnsupportedOperation, match="barrier"):
            pairs.barrier()

    in_pairs(rank)


def test_a_scope_that_does_not_exist_is_refused() -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(UsageError, match="scope='triple': expected 'all' or 'pair'"):
            group.subgroup([0], scope="triple")

    run_threads(rank, 1, timeout=PATIENCE)


def test_an_abort_ends_all_of_a_group_of_pairs() -> None:
    def rank(group: ProcessGroup) -> None:
        pairs = group.subgroup([0, 1], scope="pair")
        if group.rank == 0:
            pairs.abort("enough")
        with pytest.raises(GroupAborted, match="enough"):
            pairs.recv(None, 1 - group.rank).wait(PATIENCE)
        pairs.close()

    run_threads(rank, 2, timeout=PATIENCE)


# -- cancelling ------------------------------------------------------------------------------------


@TRANSPORTS
def test_a_receive_that_is_cancelled_leaves_its_message_to_the_next(transport: str) -> None:
    def rank(pairs: ProcessGroup) -> None:
        if pairs.rank == 0:
            x = torch.zeros(SIZES[1])
            future = pairs.recv(x, 1)
            assert future.cancel()
            assert not future.cancel()
            with pytest.raises(OperationCancelled, match=r"^recv from rank 1 .* was cancelled here$"):
                future.wait(PATIENCE)
            meet(pairs)
            assert bool((pairs.recv(None, 1).wait(PATIENCE) == 1).all())
            assert bool((x == 0).all())
        else:
            meet(pairs)
            pairs.send(torch.ones(SIZES[1]), 0).wait(PATIENCE)

    in_pairs(rank, transport=transport)


@TRANSPORTS
@pytest.mark.parametrize("awaited", [False, True])
def test_a_message_that_was_taken_back_has_never_been(transport: str, awaited: bool) -> None:
    """One that is awaited may be through before it is taken back, and then it is not."""

    def rank(pairs: ProcessGroup) -> bool:
        if pairs.rank == 1:
            future = pairs.send(torch.ones(SIZES[-1]), 0)
            taken_back = future.cancel()
            assert taken_back or awaited
            if taken_back:
                with pytest.raises(OperationCancelled, match=r"^send to rank 0 "):
                    future.wait(PATIENCE)
            if not awaited:
                meet(pairs)
            pairs.send(torch.full((4,), 2.0), 0).wait(PATIENCE)
            meet(pairs)
            small = pairs.send(torch.ones(1), 0, tag=5)
            assert not small.cancel()  # it is on its way
            small.wait(PATIENCE)
            return taken_back
        if not awaited:
            meet(pairs)
        first = pairs.recv(None, 1).wait(PATIENCE)
        never_been = first.tolist() == [2.0] * 4
        if not never_been:
            assert torch.equal(first, torch.ones(SIZES[-1]))
            assert pairs.recv(None, 1).wait(PATIENCE).tolist() == [2.0] * 4
        meet(pairs)
        assert pairs.recv(None, 1, tag=5).wait(PATIENCE).tolist() == [1.0]
        return never_been

    never_been, taken_back = in_pairs(rank, transport=transport)
    assert never_been == taken_back


def test_a_cancelled_message_breaks_no_group_of_the_usual_scope_either() -> None:
    def rank(group: ProcessGroup) -> None:
        if group.rank == 0:
            future = group.recv(None, 1, tag=3)
            assert future.cancel()
            with pytest.raises(OperationCancelled):
                future.wait(PATIENCE)
            assert not group.all_reduce(torch.ones(1)).cancel()
        else:
            group.all_reduce(torch.ones(1)).wait(PATIENCE)
        group.barrier().wait(PATIENCE)

    run_threads(rank, 2, timeout=PATIENCE)
