"""Rebuilding: those who live go on in a new group within milliseconds, whoever died and when."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal import (
    Evicted,
    GroupClosed,
    GroupError,
    PeerLost,
    ProcessGroup,
    RebuildCalled,
    TooFewRanks,
    UsageError,
)
from shoal.backend.native.channel import NativeChannel
from shoal.group import rebuild as rebuilding
from shoal.group.agreement import AgreementClient
from shoal.group.rebuild import Rebuilt, new_ranks
from shoal.testing import faults, no_leaks, processes, run_threads
from tests.support.waiting import until

from .ranks import PATIENCE, begin


def on_ranks(fn: Any, size: int, *args: Any, **how: Any) -> list[Any]:
    return run_threads(fn, size, *args, timeout=PATIENCE, **how)


def rebuilt(group: ProcessGroup, **how: Any) -> ProcessGroup:
    result = group.rebuild(**how)
    assert result is not None
    return result


def works(group: ProcessGroup) -> None:
    """Collectives and messages of the group give what they should."""
    for n in (1, 70_000):
        x = torch.full((n,), float(group.rank))
        group.all_reduce(x).wait()
        assert bool((x == sum(range(group.size))).all())
    if group.size > 1:
        right = (group.rank + 1) % group.size
        sent = group.send(torch.tensor([group.rank]), right)
        assert group.recv(src=(group.rank - 1) % group.size).wait().item() == (group.rank - 1) % group.size
        sent.wait()


@pytest.mark.parametrize(
    ("stays", "ranks"),
    [
        ([0, 1, 2], (0, 1, 2)),
        ([1, 2, 3], (3, 1, 2)),
        ([0, 3], (0, 3)),
        ([4], (4,)),
        ([0, 2, 5, 6], (0, 5, 2, 6)),
        ([], ()),
    ],
)
def test_who_can_keeps_its_rank(stays: list[int], ranks: tuple[int, ...]) -> None:
    assert new_ranks(stays) == ranks


# -- on purpose ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"transport": "tcp"}, {"hosts": "aabb"}])
def test_a_whole_group_is_rebuilt_again_and_again(how: dict[str, Any]) -> None:
    def rank(group: ProcessGroup) -> None:
        with group:
            for epoch in range(1, 4):
                group.barrier().wait()
                note = b"%d at %d" % (group.rank, epoch)
                old, group = group, rebuilt(group, note=note)
                assert old.state == "closed"
                with pytest.raises(GroupClosed):
                    old.barrier()
                assert (group.epoch, group.name, group.size) == (epoch, f"world@{epoch}", 4)
                assert group.rebuilt is not None
                assert group.rebuilt.notes[3] == b"3 at %d" % epoch
                assert (group.rebuilt.previous, group.rebuilt.lost, group.rebuilt.left) == (
                    (0, 1, 2, 3),
                    (),
                    (),
                )
                works(group)

    on_ranks(rank, 4, **how)


def test_ranks_leave_and_others_are_left_out() -> None:
    def rank(group: ProcessGroup) -> Any:
        me = group.rank
        group.barrier().wait()
        successor = group.rebuild(leave=me == 1, without=[4] if me == 3 else [])
        if successor is None:
            return group.state
        works(successor)
        return successor.rank, successor.rebuilt

    results = on_ranks(rank, 5)
    plan = Rebuilt((0, 3, 2), (), (1, 4), dict.fromkeys(range(5), b""), (0, 0))
    assert results == [(0, plan), "closed", (2, plan), (1, plan), "closed"]


def test_subgroups_go_on_and_the_block_of_the_old_group_closes_the_new_one() -> None:
    def rank(group: ProcessGroup) -> None:
        pair = group.subgroup([0, 1])
        with group:
            new = rebuilt(group)
            works(pair)
            inner = new.subgroup([1, 0])
            works(inner)
            inner.close()
        assert new.state == "closed"
        works(pair)
        pair.close()

    on_ranks(rank, 2)


def test_groups_of_pairs_are_rebuilt() -> None:
    def rank(group: ProcessGroup) -> None:
        pairs = rebuilt(group.subgroup([2, 1, 0], scope="pair"))
        assert pairs.ranks == (2, 1, 0)
        if pairs.rank:
            pairs.send(torch.tensor([pairs.rank]), 0).wait()
        else:
            assert [pairs.recv(src=other).wait().item() for other in (2, 1)] == [2, 1]
        pairs.close()

    on_ranks(rank, 3)


def test_rebuilds_without_end_keep_nothing() -> None:
    def rank(group: ProcessGroup) -> None:
        with group:
            new, older = group, []
            for _ in range(1500):
                older.append(weakref.ref(new))
                new = rebuilt(new)
            # gc.collect() returns at once while the other rank's thread is in it.
            until(lambda: gc.collect() >= 0 and sum(each() is not None for each in older) == 1)
            assert older[0]() is group
        assert new.state == "closed"

    on_ranks(rank, 2)


def test_messages_of_the_old_group_never_arrive_in_the_new_one() -> None:
    def rank(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(torch.ones(1), 1).wait()
        new = rebuilt(group)
        if group.rank == 0:
            new.send(torch.zeros(1), 1).wait()
        else:
            assert new.recv(src=0).wait().item() == 0.0
        new.barrier().wait()

    on_ranks(rank, 2)


def test_too_few_ranks_leave_the_group_as_it_was() -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(TooFewRanks, match="1 of 2 ranks would remain, and min_size is 2: rank 0 leaves"):
            group.rebuild(min_size=2 if group.rank else 1, leave=group.rank == 0)
        works(group)
        with pytest.raises(UsageError, match="min_size=3: expected 1 to 2"):
            group.rebuild(min_size=3)
        with pytest.raises(UsageError, match="every element of without"):
            group.rebuild(without=[2])
        with pytest.raises(UsageError, match="note must be bytes"):
            group.rebuild(note="text")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"a note of 5000 bytes: there is room for 40[0-9]{2}"):
            group.rebuild(note=bytes(5000))
        with group:  # which is the new one's from now on
            new = rebuilt(group, note=bytes(4000))
            assert (new.epoch, new.name) == (2, "world@2")  # the first was that of the call that failed
            works(new)
        assert new.state == group.state == "closed"

    on_ranks(rank, 2)


def test_lost_ranks_are_fenced_unless_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fenced: list[str] = []
    fence = NativeChannel.fence

    def noted(self: NativeChannel, ranks: Sequence[int], timeout: float) -> list[int]:
        fenced.append(self._spec.name)
        return fence(self, ranks, timeout)

    monkeypatch.setattr(NativeChannel, "fence", noted)

    def rank(group: ProcessGroup) -> None:
        works(rebuilt(rebuilt(group, fence=False)))

    on_ranks(rank, 2)
    assert fenced == ["world@1", "world@1"]


def test_a_store_is_shared_by_those_of_one_epoch() -> None:
    def rank(group: ProcessGroup) -> None:
        new = rebuilt(group)
        new.store.set(f"key/{new.rank}", b"new")
        group.store.set(f"key/{new.rank}", b"old")  # as one writes that does not know of the rebuild
        assert new.store.get(f"key/{1 - new.rank}") == b"new"
        new.barrier().wait()
        newer = rebuilt(new)
        assert not newer.store.check(["key/0"])
        newer.barrier().wait()

    on_ranks(rank, 2)


def test_a_rebuild_that_fails_goes_on_with_the_group_that_others_have() -> None:
    """Ranks 0 and 2 have the new group; rank 1 gave up waiting for it, and finds them with its next call."""

    class GaveUp(Exception):
        pass

    def give_up(_: Any) -> None:
        raise GaveUp

    def rank(group: ProcessGroup) -> Any:
        if group.rank != 1:
            return rebuilt(group).rebuild(leave=group.rank == 2)
        made = group._make_on_same_links

        def lame(*how: Any) -> ProcessGroup:
            successor = made(*how)
            vote = successor._agreements.vote

            def agree_once(*votes: Any, **how: Any) -> Any:
                del successor._agreements.vote
                return vote(*votes, **how).then(give_up)

            successor._agreements.vote = agree_once  # type: ignore[method-assign]
            return successor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "_make_on_same_links", lame)
            with pytest.raises(GaveUp):
                group.rebuild()
        assert group.state == "open"
        new = rebuilt(group)
        assert new.rebuilt is not None
        assert (new.rebuilt.previous, new.rebuilt.left, new.epoch) == ((0, 1), (2,), 2)
        return new

    first, second, third = on_ranks(rank, 3)
    assert (first.epoch, second.name, third) == (2, "world@2", None)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_agrees_meets_those_that_rebuild(dies: bool, grows: bool) -> None:
    """As a rank that has not heard of the loss yet: it is told of the rebuild, and comes too."""

    def rank(group: ProcessGroup) -> Any:
        if group.rank == 2 and dies:
            group.store.wait(["agrees"])
            return group.close()
        if group.rank == 1:
            calls = group._agreements.agree_to_grow(True) if grows else group.agree(1)
            group.store.set("agrees", b"")
            with pytest.raises(RebuildCalled, match=r"called rebuild\(\)") as caught:
                calls.wait()
            assert set(caught.value.ranks) <= {2}
            assert "rank 1 called agree" in str(caught.value)
        return rebuilt(group)

    first, second, third = on_ranks(rank, 3)
    assert first.size == second.size == 3 - dies
    assert (third is None) == dies
    assert (first.epoch, second.epoch) == (1, 1)


def test_who_is_cut_off_is_evicted_and_hears_it() -> None:
    def rank(group: ProcessGroup) -> Any:
        group.store.set(f"here/{group.rank}", b"")
        group.store.wait([f"here/{each}" for each in range(3)])
        if group.rank == 2:
            faults.disconnect(group, 0)
            faults.disconnect(group, 1)
        while group.state == "open":
            time.sleep(0.001)
        try:
            new = group.rebuild(timeout=1.0 if group.rank == 2 else PATIENCE)
        except GroupError as error:
            return type(error).__name__
        assert new is not None
        works(new)
        return new.rebuilt.lost

    assert on_ranks(rank, 3, hosts="aab") == [(2,), (2,), "QuorumLost"]


def test_who_comes_too_late_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_VOTE_TIMEOUT", "2")

    def rank(group: ProcessGroup) -> Any:
        if group.rank == 0:
            group.store.wait(["rebuilt"])
            with pytest.raises(Evicted):
                group.rebuild()
            return None
        new = rebuilt(group)
        works(new)
        group.store.set("rebuilt", b"")
        return new.rebuilt.lost

    assert on_ranks(rank, 3) == [None, (0,), (0,)]


# -- deaths ---------------------------------------------------------------------------------------------


def until_lost(group: ProcessGroup) -> None:
    """Work until a rank is lost."""
    try:
        while True:
            works(group)
    except PeerLost:
        pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def outlive(group: ProcessGroup, victims: tuple[int, ...]) -> tuple[int, int, int]:
    """Work; ranks die one after another, and the others go on.  ``victims`` are ranks of the first group."""
    me = group.rank
    begin(group)
    for victim in victims:
        if me == victim:
            die()
        until_lost(group)
        group = rebuilt(group)
        begin(group)
    works(group)
    return group.rank, group.size, group.epoch


@pytest.mark.parametrize("victims", [(0, 1, 2), (3, 1)])
def test_survivors_of_deaths_go_on(victims: tuple[int, ...]) -> None:
    check_survivors(outlive, victims, victims)


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_death_go_on_over_tcp(victim: int) -> None:
    check_survivors(outlive, (victim,), (victim,), transport="tcp")


def check_survivors(work: Any, dead: tuple[int, ...], *args: Any, **how: Any) -> None:
    """Four ranks work, of which some die; the others agree on the group in which they end."""
    with no_leaks(), processes(work, 4, *args, timeout=PATIENCE, **how) as ranks:
        outcomes = ranks.join()
    survivors = [outcomes[rank] for rank in range(4) if rank not in dead]
    assert all(each.ok for each in survivors), [each.describe() for each in outcomes]
    assert sorted(each.value[:2] for each in survivors) == [
        (rank, len(survivors)) for rank in range(len(survivors))
    ]
    assert len({each.value[2] for each in survivors}) == 1


def outlive_two(group: ProcessGroup, first: int, second: int, point: str) -> tuple[int, int, int]:
    """One dies, and another one at a point of the rebuild."""
    me = group.rank
    begin(group)
    if me == first:
        die()
    until_lost(group)
    if me == second:
        die_at(point)
    while group.size > 2:
        group = rebuilt(group, min_size=2)
        if group.size > 2:
            until_lost(group)
    works(group)
    return group.rank, group.size, group.epoch


def outlive_a_stopped_one(group: ProcessGroup, seed: int) -> str:
    """One is stopped in an all-reduce; what the others then do with the memory of the old group stays."""
    choose = random.Random(seed)
    victim, delay = choose.randrange(group.size), choose.uniform(0.0, 0.02)
    x = group.empty(choose.choice((1_000, 300_000)))
    begin(group)
    if group.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            x.fill_(1.0)
            group.all_reduce(x).wait()
    except PeerLost as error:
        cause = str(error)
    new = rebuilt(group)
    x.fill_(7.0)
    works(new)
    time.sleep(0.2)
    assert bool((x == 7.0).all())
    new.close()
    return cause


@pytest.mark.parametrize("seed", range(2))
def test_a_stopped_rank_that_is_given_up_writes_nothing_any_more(seed: int) -> None:
    victim = random.Random(seed).randrange(3)
    # A survivor that ran late itself, on a loaded machine, waits for up to a minute longer.
    with no_leaks(), processes(outlive_a_stopped_one, 3, seed, timeout=90.0) as ranks:
        outcomes = ranks.join()
    assert outcomes.pop(victim).describe() == f"rank {victim} was ended by SIGKILL"
    for each in outcomes:
        assert each.ok, each.describe()
        assert "its process is stopped" in each.value


def die_at(point: str) -> None:
    """Let this process die where it gets to ``point`` of a rebuild."""
    owner, name, after = {
        "asked": (AgreementClient, "vote", False),
        "voted": (AgreementClient, "vote", True),
        "decided": (rebuilding, "make_successor", False),
        "grouped": (rebuilding, "make_successor", True),
        "synced": (rebuilding, "replace_by", False),
    }[point]
    function = getattr(owner, name)

    def deadly(*args: Any, **how: Any) -> None:
        kept = function(*args, **how) if after else None  # what is dropped is closed, which others hear
        die()
        del kept

    setattr(owner, name, deadly)


@pytest.mark.parametrize("point", ["asked", "voted", "decided", "grouped", "synced"])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (2, 0), (3, 2)])
def test_a_second_death_at_a_point_of_the_rebuild(first: int, second: int, point: str) -> None:
    check_survivors(outlive_two, (first, second), first, second, point)


def outlive_two_by_chance(group: ProcessGroup, seed: int) -> tuple[int, int, int]:
    """One dies, and another one at any moment of the rebuild."""
    choose = random.Random(seed)
    first, second = choose.sample(range(group.size), 2)
    delay = choose.uniform(0.0, 0.004)
    if group.rank == second:
        timer = threading.Timer(delay, die)
        vote = group._agreements.vote
        group._agreements.vote = lambda *args, **how: timer.start() or vote(*args, **how)  # type: ignore[method-assign, func-returns-value]
    return outlive_two(group, first, -1, "")


@pytest.mark.parametrize("seed", range(8))
def test_a_second_death_at_any_moment_of_the_rebuild(seed: int) -> None:
    first, second = random.Random(seed).sample(range(4), 2)
    check_survivors(outlive_two_by_chance, (first, second), seed)
