"""Groups live and end independently of one another; the connections go with the last of them."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch

import shoal
from shoal import MemoryStore, ProcessGroup
from shoal.backend.base import GroupSpec
from shoal.links import Links
from shoal.testing import no_leaks, processes, run_threads
from tests.support.waiting import until

from .null_backend import NullBackend, NullChannel, null_group

PATIENCE = 30.0
ENGINES: list[dict[str, Any]] = [{"transport": "shm"}, {"transport": "tcp"}, {"backend": "store"}]


@pytest.mark.parametrize("engine", ENGINES, ids=["shm", "tcp", "store"])
def test_a_subgroup_goes_on_after_the_world_was_closed(engine: dict[str, Any], store_backend: str) -> None:
    def rank(group: ProcessGroup) -> tuple[str, str, float]:
        with group.subgroup([0, 1, 2]) as part:
            x = torch.ones(3)
            under_way = part.all_reduce(x)
            group.close()
            under_way.wait()
            for _ in range(3):
                part.all_reduce(x).wait()
            part.store.set(f"still here {part.rank}", b"")
            states = (group.state, part.state)
            with pytest.raises(shoal.GroupClosed):
                group.barrier()
        return *states, x[0].item()

    with no_leaks():
        assert run_threads(rank, 3, timeout=40, **engine) == [("closed", "open", 81.0)] * 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_may_close_their_groups_in_different_orders(transport: str) -> None:
    def rank(group: ProcessGroup) -> None:
        parts = [group.split(0), group.split(0, key=-group.rank), group]
        for part in parts:
            assert part is not None
            part.all_reduce(torch.ones(1000)).wait()
        futures = [part.all_reduce(torch.ones(1)) for part in parts if part is not None]
        order = [(group.rank + step) % 3 for step in range(3)]
        for place in order:
            part = parts[place]
            assert part is not None
            part.close()
            assert futures[place].wait().item() == 3.0

    with no_leaks():
        run_threads(rank, 3, timeout=40, transport=transport)


def hear_of_a_death(group: ProcessGroup) -> tuple[int, ...]:
    """Close the world; rank 2 is killed then, and the others miss it in a subgroup of theirs."""
    part = group.subgroup([2, 1, 0])
    part.barrier().wait()
    group.close()
    group.store.set(f"closed{group.rank}", b"")
    if group.rank == 2:
        group.store.get("never", PATIENCE)
    with pytest.raises(shoal.PeerLost) as lost:
        part.all_reduce(torch.ones(1)).wait(PATIENCE)
    part.close()
    return lost.value.ranks


def test_a_death_after_the_world_was_closed_is_told_to_the_subgroup() -> None:
    with processes(hear_of_a_death, 3) as ranks:
        ranks.store.wait([f"closed{rank}" for rank in range(3)], PATIENCE)
        ranks.kill(2)
        outcomes = ranks.join()
    assert [outcomes[rank].value for rank in (0, 1)] == [(0,), (0,)]


def test_the_connections_go_with_the_last_group() -> None:
    released: list[float] = []
    group, _ = null_group(owner=released.append)
    part, other = group.subgroup([1, 2]), group.subgroup([1, 3])
    group.close()
    part.close()
    assert (released, group.world.members()) == ([], [other])
    nested = other.subgroup([0])
    other.close()
    assert released == []
    nested.close()
    assert len(released) == 1
    with pytest.raises(shoal.GroupClosed):
        nested.subgroup([0])


def test_a_world_closes_all_that_is_left_of_it() -> None:
    released: list[float] = []
    group, _ = null_group(owner=released.append)
    parts = [group.subgroup([1]), group.subgroup([1, 2])]
    group.world.close(5.0)
    assert [each.state for each in (group, *parts)] == ["closed"] * 3
    assert len(released) == 1
    group.world.close(5.0)
    assert len(released) == 1


def _dropped(group: ProcessGroup) -> None:
    with pytest.warns(ResourceWarning, match=r"<ProcessGroup 'null/kept:1,2:1': .* never closed"):
        group.subgroup([1, 2], "kept")


def test_a_dropped_group_is_closed_with_a_warning_that_names_it() -> None:
    released: list[float] = []
    group, _ = null_group(owner=released.append)
    with no_leaks():
        _dropped(group)
        until(lambda: group.world.members() == [group])
    backend: Any = group._backend
    assert len(backend.channels[1].closed_within) == 1
    group.close()
    assert len(released) == 1


def test_a_group_that_is_dropped_in_a_cycle_is_closed_too() -> None:
    group, _ = null_group()
    part = group.subgroup([1, 2])
    part.myself = part  # type: ignore[attr-defined]
    group.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del part
        gc.collect()
    named = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert any("'null/subgroup:1,2:1'" in text for text in named)
    caught.clear()
    until(lambda: not group.world.members())


def test_a_dropped_group_is_closed_with_its_world_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    released: list[float] = []
    group, _ = null_group(owner=released.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        _dropped(group)
    assert len(group.world.members()) == 2
    group.world.close(5.0)
    assert (group.world.members(), len(released)) == ([], 1)


@pytest.mark.parametrize("ended", [True, False])
def test_connections_of_a_groups_own_are_closed_if_it_cannot_be_made(ended: bool) -> None:
    closed: list[float] = []

    class Exhausted(NullBackend):
        def channel(self, group: GroupSpec) -> NullChannel:
            raise shoal.OutOfSharedMemory("none is left")

        def close(self, timeout: float) -> None:
            closed.append(timeout)

    group, _ = null_group()
    if ended:
        group.world.close(5.0)
    links, spec = Links(Exhausted(), (1, 2), group._links.factory, {}), GroupSpec("own", 78, 0, (1, 2))
    with pytest.raises(shoal.GroupClosed if ended else shoal.OutOfSharedMemory):
        ProcessGroup._in(group.world, links, spec, MemoryStore(), timeout=9.0)
    assert len(closed) == 1
    assert group.state == ("closed" if ended else "open")
    group.close()


@pytest.mark.concurrency
def test_the_connections_go_once_whoever_closes_last() -> None:
    for _ in range(50):
        released: list[float] = []
        group, _ = null_group(owner=released.append)
        groups = [group, *(group.subgroup([1]) for _ in range(4))]
        start = threading.Barrier(len(groups))

        def close(part: ProcessGroup, start: threading.Barrier = start) -> None:
            start.wait()
            part.close()

        threads = [threading.Thread(target=close, args=(part,)) for part in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(released) == 1
