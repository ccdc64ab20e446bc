"""Cuts: hosts that live and cannot reach each other.  One side goes on, never two."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from shoal import Evicted, PeerLost, ProcessGroup, QuorumLost
from shoal.testing import Network, Outcome, no_leaks, processes
from tests.support.networks import network

from .ranks import PATIENCE

__all__ = ["network"]

#: seconds of silence after which a host is lost, and in which one that cannot go on looks for the others
HEARTBEAT, SHORT = 1.5, 3.0


def outlive(group: ProcessGroup, seconds: Sequence[float]) -> list[int]:
    """Work until a rank is lost, and go on without it; the ranks of the first group that do so together.

    Args:
        seconds: for each rank, until it gives up going on.
    """
    me, world, together, operations = group.rank, group.world, list(range(group.size)), 0
    group.barrier().wait()
    group.store.set(f"ready/{me}", b"")
    try:
        while group.epoch == 0 or operations < 50:
            x = torch.full((5_000,), float(group.rank))
            try:
                group.all_reduce(x).wait()
            except PeerLost:
                new = group.rebuild(timeout=seconds[me], note=b"%d" % me)
                assert new is not None
                assert new.rebuilt is not None
                together = sorted(int(new.rebuilt.notes[old]) for old in new.rebuilt.previous)
                group, operations = new, 0
                continue
            assert bool((x == sum(range(group.size))).all())
            operations += 1
            time.sleep(0.002)
        return together
    finally:
        world.close(PATIENCE)


@dataclass(frozen=True)
class Case:
    """A job whose network is cut.

    Attributes:
        sides: the host of each rank.
        cut: does it.
        goes_on: the hosts whose ranks go on.
    """

    sides: str
    cut: Callable[[Network], object]
    goes_on: str


def cut_all(cases: Sequence[Case], seconds: float = SHORT) -> list[list[Outcome]]:
    """What becomes of the ranks of several jobs, whose networks are cut at one time.

    Args:
        seconds: until those who do not go on give up.
    """
    with no_leaks(), ExitStack() as stack:
        networks, jobs = [], []
        for case in cases:
            networks.append(stack.enter_context(Network(*sorted(set(case.sides)))))
            limits = [PATIENCE if side in case.goes_on else seconds for side in case.sides]
            how = {"hosts": list(case.sides), "network": networks[-1], "heartbeat_timeout": HEARTBEAT}
            ranks = processes(
                outlive, len(limits), limits, timeout=PATIENCE, env={"SHOAL_VOTE_TIMEOUT": "4"}, **how
            )
            jobs.append(stack.enter_context(ranks))
        for case, ranks in zip(cases, jobs, strict=True):
            ranks.store.wait([f"ready/{rank}" for rank in range(len(case.sides))])
        for case, network in zip(cases, networks, strict=True):
            case.cut(network)
        return [ranks.join() for ranks in jobs]


def check(outcomes: Sequence[Outcome], together: Collection[int]) -> None:
    """These ranks have gone on together, and all others have raised."""
    for each in outcomes:
        if each.rank in together:
            assert each.value == sorted(together), each.describe()
        else:
            assert isinstance(each.error, (QuorumLost, Evicted)), each.describe()


CASES = {
    "two ways": Case("abc", lambda it: it.drop("c", "ab"), "ab"),
    "one way, from rank 0": Case("abc", lambda it: it.drop_one_way("a", "bc"), "bc"),
    "one way, to rank 2": Case("abc", lambda it: it.drop_one_way("ab", "c"), "ab"),
    "with resets": Case("abc", lambda it: it.reset("b", "ac"), "ac"),
    "its device is down": Case("abc", lambda it: it.down("a"), "bc"),
    "from the store too": Case("abc", lambda it: it.drop("a", ["b", "c", "store"]), "bc"),
    "2 of 5": Case("aabbb", lambda it: it.drop("a", "b"), "b"),
    "2 of 5, with resets": Case("aaabb", lambda it: it.reset("a", "b"), "a"),
    "a half without the store": Case("aabb", lambda it: it.drop("b", ["a", "store"]), "a"),
    "the half of rank 0 without the store": Case("aabb", lambda it: it.drop("a", ["b", "store"]), "b"),
    "two halves without the store": Case(
        "aabb", lambda it: (it.drop("ab", "store"), it.drop("a", "b")), ""
    ),
    "everybody alone": Case("abc", lambda it: it.drop("abc", "abc"), ""),
}  # fmt: skip


# Several at a time, because ranks mostly wait for their timeouts.
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("names", [list(CASES)[start::3] for start in range(3)], ids=", ".join)
def test_those_who_are_cut_off_stop_and_the_others_go_on(names: list[str]) -> None:
    cases = [CASES[name] for name in names]
    for case, outcomes in zip(cases, cut_all(cases), strict=True):
        check(outcomes, [rank for rank, side in enumerate(case.sides) if side in case.goes_on])


def by_chance(seed: int) -> Case:
    """A cut, at any moment, that leaves a majority together."""
    choose = random.Random(seed)
    sides = choose.choice(["abc", "aabbb", "aabbc", "abcde", "aaabcc"])
    names = sorted(set(sides))
    while True:
        off = choose.sample(names, choose.randint(1, len(names) - 1))
        if 2 * sum(side in off for side in sides) < len(sides):
            break
    others = [name for name in names if name not in off]
    how, store = choose.choice(["drop", "drop_one_way", "reset"]), choose.choice([[], ["store"]])
    turned, delay = choose.choice([True, False]), choose.uniform(0.0, 0.1)

    def cuts(network: Network) -> None:
        time.sleep(delay)
        some, rest = off, others + store
        getattr(network, how)(*((rest, some) if turned else (some, rest)))

    return Case(sides, cuts, "".join(others))


@pytest.mark.stress
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("first", range(0, 30 if os.environ.get("STRESS") == "short" else 100, 5))
def test_of_cuts_by_chance_the_majority_goes_on(first: int) -> None:
    cases = [by_chance(seed) for seed in range(first, first + 5)]
    for seed, case, outcomes in zip(range(first, first + 5), cases, cut_all(cases), strict=True):
        stay = [rank for rank, side in enumerate(case.sides) if side in case.goes_on]
        assert [each.value for each in outcomes if each.ok] == [stay] * len(stay), (seed, case.sides)
        check(outcomes, stay)


@pytest.mark.usefixtures("network")
def test_of_two_halves_the_store_chooses_one() -> None:
    cases = [
        Case("aabb", lambda it: it.drop("b", "a"), ""),
        Case("aabb", lambda it: it.drop_one_way("b", "a"), ""),
        Case("aabb", lambda it: it.reset("b", "a"), ""),
    ]
    for outcomes in cut_all(cases, seconds=PATIENCE / 2):
        values = [each.value for each in outcomes if each.ok]
        assert values in ([[0, 1]] * 2, [[2, 3]] * 2), [each.describe() for each in outcomes]
        check(outcomes, values[0])


@pytest.mark.usefixtures("network")
def test_of_two_that_reach_a_third_but_not_each_other_one_stops() -> None:
    cases = [
        Case("abc", lambda it: it.drop("a", "b"), "ac"),
        Case("abc", lambda it: it.drop("a", "c"), "ab"),
        Case("abc", lambda it: it.drop_one_way("b", "c"), "ab"),
    ]
    for outcomes in cut_all(cases, seconds=PATIENCE / 2):
        # Which of the two depends on who notices the cut first.
        together = [each.value for each in outcomes if each.ok]
        assert len(together) == 2, [each.describe() for each in outcomes]
        check(outcomes, together[0])


def test_a_cut_that_is_healed_in_time_is_noticed_by_nobody(network: Network) -> None:
    with (
        no_leaks(),
        processes(
            work_until_told, 4, hosts=list("aabb"), network=network, heartbeat_timeout=PATIENCE,
            timeout=PATIENCE,
        ) as ranks,
    ):  # fmt: skip
        ranks.store.wait(["working"])
        network.drop("a", ["b", "store"])
        time.sleep(0.5)
        network.heal()
        ranks.store.set("enough", b"")
        outcomes = ranks.join()
    assert len({each.value for each in outcomes if each.ok}) == 1, [each.describe() for each in outcomes]


def work_until_told(group: ProcessGroup) -> int:
    """Work until the test says that it is enough; how many operations that took."""
    operations = 0
    while True:
        x = torch.tensor([float(group.rank == 0 and group.store.check(["enough"])), 1.0])
        group.all_reduce(x).wait()
        assert x[1] == group.size
        operations += 1
        if operations == 20 and group.rank == 0:
            group.store.set("working", b"")
        if x[0]:
            return operations


def test_those_who_were_given_up_stay_out_when_the_cut_is_healed(network: Network) -> None:
    with (
        no_leaks(),
        processes(
            outlive_the_cut, 3, hosts=list("abc"), network=network, heartbeat_timeout=HEARTBEAT,
            timeout=PATIENCE,
        ) as ranks,
    ):  # fmt: skip
        ranks.store.wait([f"ready/{rank}" for rank in range(3)])
        network.drop("a", "bc")
        ranks.store.wait(["gone on"])
        network.heal()
        ranks.store.set("healed", b"")
        outcomes = ranks.join()
    check(outcomes, [1, 2])


def outlive_the_cut(group: ProcessGroup) -> list[int]:
    """As `outlive`, and those who go on stay until the cut is healed, and a while more."""
    me, store = group.rank, group.store
    try:
        group.barrier().wait()
        store.set(f"ready/{me}", b"")
        with contextlib.suppress(PeerLost):
            while True:
                group.barrier().wait()
        if me == 0:
            store.wait(["healed"])
        new = group.rebuild(timeout=4.0 if me == 0 else PATIENCE, note=b"%d" % me)
        assert new is not None
        assert new.rebuilt is not None
        store.set("gone on", b"")
        store.wait(["healed"])
        for _ in range(100):
            x = torch.ones(1)
            new.all_reduce(x).wait()
            assert x.item() == new.size == 2
            time.sleep(0.01)
        return sorted(int(new.rebuilt.notes[old]) for old in new.rebuilt.previous)
    finally:
        group.world.close(PATIENCE)


def go_on(group: ProcessGroup) -> int:
    """Until a rank is lost, and then without it."""
    group.barrier().wait()
    group.store.set(f"ready/{group.rank}", b"")
    with contextlib.suppress(PeerLost):
        while True:
            group.barrier().wait()
    new = group.rebuild(timeout=4.0 if group.rank == 2 else PATIENCE)
    assert new is not None
    return new.size


def test_closing_does_not_wait_for_a_host_that_is_lost(network: Network) -> None:
    with (
        no_leaks(),
        processes(
            go_on, 3, hosts=list("abc"), network=network, heartbeat_timeout=HEARTBEAT, timeout=PATIENCE,
            op_timeout=10 * PATIENCE,
        ) as ranks,
    ):  # fmt: skip
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], PATIENCE)
        network.drop("c", "ab")
        first, second, _ = ranks.join()
    assert (first.value, second.value) == (2, 2), [first.describe(), second.describe()]
