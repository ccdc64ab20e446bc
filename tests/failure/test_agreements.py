"""Agreements: who lives gets the same value and ranks, and two parts of a group never go on apart."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shoal import (
    Agreement,
    CollectiveMismatch,
    Evicted,
    GroupClosed,
    GroupError,
    OperationTimeout,
    ProcessGroup,
    QuorumLost,
    StoreError,
    StoreTimeout,
    UnsupportedOperation,
    UsageError,
)
from shoal.backend.native import channel as native
from shoal.future import wait_all
from shoal.group import AgreementOp, FailureScope
from shoal.testing import faults, no_leaks, processes, run_threads
from shoal.world import World
from tests.group.null_backend import null_group

from .ranks import PATIENCE, begin

#: seconds until a decision that cannot come has been waited for
SHORT = 3.0


def on_ranks(fn: Callable[..., Any], size: int, *args: Any, **how: Any) -> list[Any]:
    return run_threads(fn, size, *args, timeout=PATIENCE, **how)


def outcome(group: ProcessGroup, timeout: float = PATIENCE) -> Agreement[tuple[bytes, ...]] | GroupError:
    """What ``agree`` gives or raises, where each rank votes with its number."""
    try:
        return group.agree(b"%d" % group.rank, "gather", timeout=timeout).wait()
    except GroupError as error:
        return error


def of_ranks(ranks: tuple[int, ...], size: int) -> Agreement[tuple[bytes, ...]]:
    """What ``outcome`` gives where these go on."""
    lost = tuple(rank for rank in range(size) if rank not in ranks)
    return Agreement(tuple(b"%d" % rank for rank in ranks), ranks, lost)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "votes", "value"),
    [
        ("and", [7, 14, 6], 6),
        ("and", [True, False, True], 0),
        ("or", [1, 2, -(2**63)], 3 - 2**63),
        ("min", [5, -3, 2**62], -3),
        (AgreementOp.MIN, [5, -3, 2**62], -3),
        ("max", [-5, -3, -(2**63)], -3),
        ("sum", [2**63 - 1, 1, 5], 5 - 2**63),
        ("common", [[3, -1, 2], (2, -1, -1, 9), {-1: None, 2: None, 3: None}], (-1, 2)),
        ("common", [[], [1], [2]], ()),
        ("gather", [b"", b"two\0", b"x" * 4096], (b"", b"two\0", b"x" * 4096)),
    ],
)
def test_votes_become_one_value(op: Any, votes: list[Any], value: Any) -> None:
    def vote(group: ProcessGroup) -> Agreement[Any]:
        return group.agree(votes[group.rank], op).wait()

    assert on_ranks(vote, 3) == [Agreement(value, (0, 1, 2), ())] * 3


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_agreements_of_any_order_beside_collectives(size: int, transport: str) -> None:
    def rank(group: ProcessGroup) -> None:
        x = torch.ones(1000)
        agreed = []
        for i in range(50):
            agreed.append(group.agree(i + group.rank, "max"))
            group.all_reduce(x)
        wait_all(agreed)
        assert [each.value().value for each in agreed] == [i + size - 1 for i in range(50)]

    on_ranks(rank, size, transport=transport)


def test_no_more_are_under_way_than_are_remembered() -> None:
    def rank(group: ProcessGroup) -> None:
        if group.rank == 1:
            group.store.wait(["refused"])
        agreed = [group.agree(i, "max") for i in range(64)]
        if group.rank == 0:
            with pytest.raises(GroupError, match=r"agree on rank 0 of group .*: 64 agreements are under way"):
                group.agree(0)
            group.store.set("refused", b"")
        assert [each.value for each in wait_all(agreed)] == list(range(64))
        assert group.agree(group.rank, "sum").wait().value == 1

    on_ranks(rank, 2)


def test_what_is_no_vote_is_refused_and_counts_for_nothing() -> None:
    def rank(group: ProcessGroup) -> None:
        agree: Any = group.agree
        for value, op, said in (
            (1, ["and"], r"op=\['and'\]: expected one of"),
            (1, "xor", "op='xor': expected one of and, or, min, max, sum, common, gather"),
            (2**63, "and", "takes an integer of 64 bits, got 9223372036854775808"),
            (1.5, "sum", "op='sum' takes an integer of 64 bits, got 1.5"),
            (1, "common", "op='common' takes integers, got int"),
            (["1"], "common", "each an integer of 64 bits, got '1'"),
            (range(513), "common", "a vote of 4104 bytes: there is room for 4096 in a group of 2"),
            ("text", "gather", "op='gather' takes bytes, got str"),
            (bytes(4097), "gather", "a vote of 4097 bytes: there is room for 4096"),
        ):
            with pytest.raises(UsageError, match=said.replace("(", r"\(")) as caught:
                agree(value, op)
            assert f"agree on rank {group.rank}" in str(caught.value)
        with pytest.raises(UsageError, match="timeout"):
            group.agree(1, timeout=-1.0)
        assert group.agree(group.rank, "sum").wait().value == 1

    on_ranks(rank, 2)


def test_ranks_that_give_different_ops_all_hear_of_it() -> None:
    def rank(group: ProcessGroup) -> str:
        if group.rank == 2:  # it comes when the others know, and is not left out
            group.store.wait(["knows/0", "knows/1"])
        with pytest.raises(CollectiveMismatch) as caught:
            group.agree(1, "and" if group.rank else "or").wait()
        group.store.set(f"knows/{group.rank}", b"")
        assert group.agree(1, "sum").wait().value == 3  # and the group is as it was
        return str(caught.value)

    first, second, third = on_ranks(rank, 3)
    both = "rank 0 called agree(op='or'); rank 1 called agree(op='and')"
    assert first == f"agree on rank 0 of group 'world': {both}"
    assert second == f"agree on rank 1 of group 'world': {both}"
    assert "rank 0 called agree(op='or'); ranks 1, 2 called agree(op='and')" in third


def test_ranks_that_agree_to_grow_wait_for_one_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_VOTE_TIMEOUT", "0.3")

    def rank(group: ProcessGroup) -> Any:
        began = time.monotonic()
        if group.rank == 1:
            time.sleep(1.0)
        agreed = group._agreements.agree_to_grow(group.rank != 2).wait()
        assert group.rank == 1 or time.monotonic() - began > 0.6
        return agreed

    assert on_ranks(rank, 3) == [Agreement(0, (0, 1, 2), ())] * 3


def test_a_backend_without_agreements_says_so() -> None:
    group, _ = null_group()
    with (
        group,
        pytest.raises(UnsupportedOperation, match=r"the backend of group '.*' on rank 1 has no agreements"),
    ):
        group.agree(1)


# -- whatever became of the group --------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["aborted", "timed out", "of pairs"])
def test_a_group_that_carries_no_collectives_any_more_agrees(ends: str) -> None:
    def rank(group: ProcessGroup) -> None:
        with group.subgroup(
            range(group.size), scope=FailureScope.PAIR if ends == "of pairs" else "all"
        ) as own:
            if ends == "aborted" and own.rank == 1:
                own.abort("for the test")
            if ends == "timed out" and own.rank == 1:
                with pytest.raises(OperationTimeout):
                    own.barrier(timeout=0.01).wait()
            assert outcome(own) == of_ranks((0, 1, 2), 3)
            group.barrier().wait()
            assert own.state == {"aborted": "aborted", "timed out": "broken"}.get(ends, "open")
            assert outcome(own) == of_ranks((0, 1, 2), 3)
            group.barrier().wait()

    on_ranks(rank, 3)


def test_a_closed_group_agrees_on_nothing() -> None:
    def rank(group: ProcessGroup) -> None:
        with group.subgroup(range(group.size)) as own:
            pending = own.agree(1) if own.rank == 0 else None
            group.barrier().wait()
            if pending is not None:
                own.close()
                with pytest.raises(GroupClosed, match=r"agree on rank 0 .* the group was closed before"):
                    pending.wait()
            group.barrier().wait()
        with pytest.raises(GroupClosed, match="is closed"):
            own.agree(1)

    on_ranks(rank, 2)


def test_who_has_left_is_not_waited_for() -> None:
    def rank(group: ProcessGroup) -> Any:
        own = group.subgroup(range(group.size))
        assert outcome(own) == of_ranks((0, 1, 2, 3), 4)
        with own:
            return None if own.rank in (0, 3) else outcome(own)

    assert on_ranks(rank, 4) == [None, of_ranks((1, 2), 4), of_ranks((1, 2), 4), None]


def test_what_is_decided_reaches_the_others_before_a_rank_leaves() -> None:
    def rank(group: ProcessGroup, round: int) -> Any:
        own = group.subgroup(range(group.size))
        result = outcome(own)
        own.close()  # at once: others may still wait for the decision
        return result

    for round in range(30):
        assert on_ranks(rank, 3, round) == [of_ranks((0, 1, 2), 3)] * 3


# -- who does not vote ---------------------------------------------------------------------------------


def test_who_votes_too_late_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_VOTE_TIMEOUT", "2")

    def rank(group: ProcessGroup) -> Any:
        if group.rank == 1:
            group.store.wait(["decided"])
        result = outcome(group)
        group.store.set("decided", b"")
        return result

    first, late, last = on_ranks(rank, 3)
    assert first == last == of_ranks((0, 2), 3)
    assert isinstance(late, Evicted)
    assert late.ranks == (0, 2)
    assert "agree on rank 1 of group 'world': ranks 0, 2 decided to go on without this rank" in str(late)


def test_a_rank_that_answers_but_does_not_vote_is_waited_for_until_the_timeout() -> None:
    def rank(group: ProcessGroup) -> Any:
        if group.rank == 1:
            group.store.wait(["over"])
            return None
        result = outcome(group, SHORT)
        group.store.set("over", b"")
        return result

    waited, _ = on_ranks(rank, 2)
    assert isinstance(waited, OperationTimeout)
    assert "no decision within 3 s: a rank that can be reached has not voted" in str(waited)


# -- parts of a group that cannot reach each other -------------------------------------------------------


def divided(group: ProcessGroup, sides: str, timeout: float) -> Any:
    """Cut all connections between the ranks of different sides; then what ``agree`` gives."""
    if group.store.add("came", 1) == group.size:
        group.store.set("all came", b"")
    group.store.wait(["all came"])
    for other in range(group.size):
        if sides[other] != sides[group.rank]:
            faults.disconnect(group, other)
    while group.state == "open":
        time.sleep(0.001)
    return outcome(group, timeout)


@pytest.mark.parametrize("sides", ["aab", "abbab", "aaaab"])
def test_the_larger_side_goes_on(sides: str) -> None:
    size = len(sides)
    larger = max("ab", key=sides.count)

    def rank(group: ProcessGroup) -> Any:
        return divided(group, sides, PATIENCE if sides[group.rank] == larger else SHORT)

    ranks = tuple(rank for rank in range(size) if sides[rank] == larger)
    for side, result in zip(sides, on_ranks(rank, size, hosts=sides), strict=True):
        if side == larger:
            assert result == of_ranks(ranks, size)
        else:
            assert isinstance(result, QuorumLost)
            assert set(ranks) <= set(result.ranks)  # and those of its own side that have given up before it
            assert f"this side has less than half of the {size} ranks" in str(result)


@pytest.mark.parametrize("sides", ["ab", "aabb", "abba"])
def test_of_two_halves_the_store_chooses_one(sides: str) -> None:
    def rank(group: ProcessGroup) -> Any:
        return divided(group, sides, 5.0)

    results = on_ranks(rank, len(sides), hosts=sides)
    won = {side for side, result in zip(sides, results, strict=True) if isinstance(result, Agreement)}
    assert len(won) == 1, results
    ranks = tuple(rank for rank, side in enumerate(sides) if side in won)
    for rank_, result in enumerate(results):
        if rank_ in ranks:
            assert result == of_ranks(ranks, len(sides))
        else:  # it has heard of the decision from the store, or the store has refused it
            assert isinstance(result, (Evicted, QuorumLost)), result


def _unreachable(timeout: float) -> Any:
    raise StoreError("it is cut off")


def test_two_halves_without_a_store_both_stop() -> None:
    def rank(group: ProcessGroup) -> Any:
        group.store.clone = _unreachable  # type: ignore[method-assign]
        return divided(group, "ab", SHORT)

    said = (
        "this side has exactly half of the 2 ranks; the store could not be asked: StoreError: it is cut off"
    )
    for result in on_ranks(rank, 2, hosts="ab"):
        assert isinstance(result, QuorumLost), result
        assert said in str(result)


def _silent(timeout: float = 2 * PATIENCE) -> Any:
    time.sleep(timeout)
    raise StoreTimeout("it does not answer")


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    def rank(group: ProcessGroup) -> Any:
        group.store.clone = _silent  # type: ignore[method-assign]
        return divided(group, "ab", SHORT)

    for result in on_ranks(rank, 2, hosts="ab"):
        assert isinstance(result, QuorumLost), result


def test_who_believes_every_loss_goes_on_in_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_QUORUM", "any")

    def rank(group: ProcessGroup) -> Any:
        return divided(group, "ab", 5.0)

    assert on_ranks(rank, 2, hosts="ab") == [of_ranks((0,), 2), of_ranks((1,), 2)]


# -- deaths ------------------------------------------------------------------------------------------


def agree_until_lost(group: ProcessGroup, victim: int, seed: int) -> list[Agreement[int]]:
    """Agreements one after another, in some of which ``victim`` dies; all whose ranks were fewer, and one."""
    choose = random.Random(seed + group.rank)
    begin(group)
    if group.rank == victim:
        threading.Timer(choose.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
    results: list[Agreement[int]] = []
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and (not results or not results[-1].lost):
        time.sleep(choose.choice((0, 0, 0.002)))
        results.append(group.agree(1, "sum").wait())
    return results


@pytest.mark.parametrize("trial", range(12))
def test_a_death_in_an_agreement_gives_all_survivors_the_same(trial: int) -> None:
    size = (2, 3, 4)[trial % 3]
    victim = trial % size
    how: dict[str, Any] = {"transport": "tcp"} if trial % 2 else {}
    with no_leaks(), processes(agree_until_lost, size, victim, trial, timeout=PATIENCE, **how) as ranks:
        outcomes = ranks.join()
    assert outcomes[victim].exitcode == -signal.SIGKILL
    told = [outcomes[rank].value for rank in range(size) if rank != victim]
    survivors = tuple(rank for rank in range(size) if rank != victim)
    assert told[0] is not None, outcomes[survivors[0]].describe()
    assert all(each == told[0] for each in told)
    assert told[0][-1] == Agreement(size - 1, survivors, (victim,))
    assert all(each == Agreement(size, tuple(range(size)), ()) for each in told[0][:-1])


def late(connect: Callable[..., Any], membership: Any, *args: Any, **how: Any) -> Any:
    """Connect, and let rank 2 do nothing for a moment then."""
    result = connect(membership, *args, **how)
    time.sleep(0.5 if membership.rank == 2 else 0.0)
    return result


def make_the_group_late() -> None:
    World.connect = partial(late, World.connect)  # type: ignore[method-assign]


def learn_of_the_others_late() -> None:
    native.connect = partial(late, native.connect)


def dies_first(group: ProcessGroup) -> Any:
    if group.rank < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(group)


@pytest.mark.parametrize("prepare", [make_the_group_late, learn_of_the_others_late])
def test_a_death_before_the_group_was_made_is_certain_too(prepare: Callable[[], None]) -> None:
    with (
        no_leaks(),
        processes(dies_first, 3, timeout=PATIENCE, transport="shm", prepare=prepare) as ranks,
    ):
        outcomes = ranks.join()
    assert outcomes[2].value == of_ranks((2,), 3), outcomes[2].describe()


def outlives(group: ProcessGroup, victims: tuple[int, ...]) -> Any:
    """Ranks die one after another, each before the others agree."""
    for count, victim in enumerate(victims, start=1):
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        gone = set(victims[:count])
        result = outcome(group)
        while isinstance(result, Agreement) and set(result.lost) < gone:  # its death is not known yet
            result = outcome(group)
        alive = tuple(rank for rank in range(group.size) if rank not in gone)
        assert result == of_ranks(alive, group.size)
    return result


@pytest.mark.parametrize("victims", [(0, 1, 2), (3, 2, 1), (1, 0, 3)])
def test_the_last_rank_agrees_with_itself(victims: tuple[int, ...]) -> None:
    with no_leaks(), processes(outlives, 4, victims, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    (last,) = set(range(4)) - set(victims)
    assert outcomes[last].value == of_ranks((last,), 4), [each.describe() for each in outcomes]
