"""Where workers meet: at the place of a group, in a store, at a URL."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import shoal
from shoal.errors import AuthenticationError, CallTimeout, ShoalError, UsageError
from shoal.rpc import join
from shoal.testing import Agents, no_leaks, run_threads
from tests.rpc import handlers


def test_the_ranks_of_a_group_are_workers_by_rank_and_by_name() -> None:
    def rank(group: shoal.ProcessGroup) -> list[float]:
        with join(group=group, timeout=20) as agent:
            assert agent.name == f"rank{group.rank}"
            other = 1 - group.rank
            assert agent.peer(other).name == f"rank{other}"
            value = agent.peer(other).call(torch.add, torch.ones(1), group.rank).wait()
            group.barrier().wait()
            agent.barrier(["rank0", "rank1"])
        # The group outlives its agent.
        return group.all_reduce(value).wait().tolist()

    assert run_threads(rank, 2) == [[3.0], [3.0]]


@pytest.mark.parametrize("order", ["agent first", "group first"])
def test_an_agent_goes_on_when_its_group_was_aborted(order: str) -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        agent = join(group=group, timeout=20)
        other = agent.peer(1 - group.rank)
        pending = other.call(handlers.wait_for, f"rank{group.rank} aborts")
        if group.rank == 0:
            group.abort("a test")
        else:
            with pytest.raises(ShoalError, match="a test"):
                group.barrier().wait(20)
        agent.peer(group.rank).call(handlers.note, "rank0 aborts").wait()
        other.call(handlers.note, "rank1 aborts").wait()
        assert pending.wait(20) is True
        assert other.remote(int, "3").to_here() == 3
        agent.barrier(["rank0", "rank1"])
        for each in (agent, group) if order == "agent first" else (group, agent):
            each.close()

    handlers.noted.clear()
    with no_leaks():
        run_threads(rank, 2)


def test_workers_meet_in_a_store_and_in_a_file(tmp_path: Path) -> None:
    with no_leaks():
        _meet_in_a_store()
        _meet_in_a_file(f"file://{tmp_path}/place")


def _meet_in_a_store() -> None:
    with shoal.MemoryStore() as store, join("a", store=store) as a, join("b", store=store):
        assert a.peer("b").call(int, "7").wait() == 7


def _meet_in_a_file(url: str) -> None:
    with join("a", url=url) as a, join("b", url=url, job="other") as b:
        assert [a.peers(), b.peers()] == [[], []], "two jobs at one place do not meet"


def test_who_has_another_secret_does_not_join() -> None:
    with Agents() as stage, pytest.raises(AuthenticationError):
        join("a", url=stage.url, secret="another")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "", "store": shoal.MemoryStore()}, "as a worker's name"),
        ({"store": shoal.MemoryStore()}, "so its worker needs a name"),
        ({"name": "a", "memory": 0}, "memory=0: expected a whole number from 1"),
        ({"name": "a", "handlers": True}, "handlers=True: expected a whole number from 1"),
        ({"name": "a", "timeout": -1}, "timeout=-1"),
        ({"name": "a", "group": "rank0"}, "group='rank0': expected a ProcessGroup from shoal.init"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments: dict[str, object], words: str) -> None:
    with no_leaks(), pytest.raises(UsageError, match=words):
        join(**arguments)  # type: ignore[arg-type]


def test_a_call_whose_time_is_up_before_it_is_connected_is_late_and_its_worker_not_lost() -> None:
    with Agents() as stage:
        a = stage.join("a")
        stage.join("b")
        connecting = a.connections._making.setdefault("b", threading.Lock())  # as if another call were
        with connecting, pytest.raises(CallTimeout, match="could not be reached within"):
            a.peer("b").options(timeout=0.05).call(int).wait()
        with connecting, pytest.raises(CallTimeout, match="could not be reached within"):
            a.peer("b").options(timeout=0.05).post(int)
        assert a.peer("b").call(int, "7").wait() == 7
