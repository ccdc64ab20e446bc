"""Harm done to ranks of the native backend is noticed."""

from __future__ import annotations

import signal

import pytest
import torch

from shoal import PeerLost, ProcessGroup
from shoal.testing import no_leaks, processes, run_threads
from shoal.testing.faults import disconnect


def test_a_severed_connection_is_noticed_on_both_sides() -> None:
    def fn(group: ProcessGroup) -> tuple[int, ...]:
        never = group.recv(torch.empty(1), 1 - group.rank)
        group.store.set(f"ready/{group.rank}", b"")
        group.store.wait(["ready/0", "ready/1"])
        if group.rank == 0:
            disconnect(group, 1)
        with pytest.raises(PeerLost) as caught:
            never.wait()
        return caught.value.ranks

    with no_leaks():
        assert run_threads(fn, 2, transport="tcp") == [(1,), (0,)]


def wait_for_peer(group: ProcessGroup) -> None:
    if group.rank == 1:
        group.store.set("ready", b"")
        signal.pause()
    group.barrier().wait()


@pytest.mark.parametrize("hosts", [None, ["a", "b", "c"]])
def test_a_killed_rank_is_named(hosts: list[str] | None) -> None:
    with no_leaks(), processes(wait_for_peer, 3, hosts=hosts) as ranks:
        ranks.store.wait(["ready"])
        ranks.kill(1)
        outcomes = ranks.join()
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerLost), outcomes[rank].describe()
        assert error.ranks == (1,)


def lose_each_other(group: ProcessGroup) -> tuple[int, ...]:
    never = group.recv(torch.empty(1), 1 - group.rank)
    group.store.set(f"ready/{group.rank}", b"")
    with pytest.raises(PeerLost) as caught:
        never.wait()
    return caught.value.ranks


def test_a_cut_between_two_hosts_is_noticed_by_both() -> None:
    with no_leaks(), processes(lose_each_other, 2, hosts=["a", "b"]) as ranks:
        ranks.store.wait(["ready/0", "ready/1"])
        assert ranks.cut(0, 1) >= 1
        assert [outcome.value for outcome in ranks.join()] == [(1,), (0,)]
