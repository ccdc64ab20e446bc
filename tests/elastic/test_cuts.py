"""Cuts: training goes on without a host that nothing reaches, as if it had never been there."""

from __future__ import annotations

import pytest

from shoal import ProcessGroup
from shoal.elastic import Step
from shoal.testing import Network, no_leaks, processes
from tests.support.networks import network

from .training import Log, assert_as_undisturbed, train

__all__ = ["network"]

PATIENCE = 60.0
#: seconds of silence after which a host is lost
HEARTBEAT = 1.5


def training(group: ProcessGroup, at: int, point: str) -> Log:
    """Train; at a point of a step rank 0 lets the test cut the network."""
    me, store, world = group.rank, group.store, group.world

    def visit(here: str, step: Step) -> None:
        if me == 0 and (step.number, here) == (at, point) and not store.check(["cut"]):
            store.set("reached", b"")
            store.wait(["cut"])

    log = train(group, visit, min=2)
    store.set(f"trained/{me}", b"")
    world.close(0.3)  # or it would wait for those who do not hear it
    return log


@pytest.mark.parametrize(("point", "off"), [("in backward", "c"), ("before commit", "b")])
def test_training_goes_on_without_a_host_that_is_cut_off(network: Network, point: str, off: str) -> None:
    hosts = "aabbcc"
    with (
        no_leaks(),
        processes(
            training, 6, 5, point, hosts=list(hosts), network=network, heartbeat_timeout=HEARTBEAT,
            timeout=PATIENCE,
        ) as ranks,
    ):  # fmt: skip
        ranks.store.wait(["reached"])
        network.drop(off, [*(set("abc") - {off}), "store"])
        ranks.store.set("cut", b"")
        others = [rank for rank in range(6) if hosts[rank] != off]
        ranks.store.wait([f"trained/{rank}" for rank in others])
        for rank in {*range(6)} - {*others}:
            ranks.kill(rank)  # it looks for the others until its timeout
        outcomes = ranks.join()
    assert [each.rank for each in outcomes if each.exitcode is None] == others
    assert all(each.ok for each in outcomes if each.exitcode is None), [each.describe() for each in outcomes]
    logs = [each.value for each in outcomes if each.ok]
    assert_as_undisturbed(logs)
    for log in logs:
        assert [(event.previous_size, event.size) for event in log.events] == [(6, 4)]
