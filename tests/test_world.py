"""What a world does with all of its groups, whatever one of them raises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shoal.errors import StoreError, UsageError
from shoal.world import World
from tests.group.null_backend import NullBackend, NullChannel, close_all, null_group


@pytest.fixture(autouse=True)
def _close_all() -> Any:
    yield
    close_all()


def _fail(*_: object) -> None:
    raise RuntimeError("the channel is out of order")


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("method", ["begin_close", "close"])
def test_a_group_that_cannot_be_closed_keeps_no_other_one_open(
    method: str, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[float] = []
    group, _ = null_group(owner=released.append)
    groups = [group, group.subgroup([1, 2]), group.subgroup([0, 1])]
    channels: list[NullChannel] = group._backend.channels  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(channels[broken], method, _fail)
        with pytest.raises(RuntimeError, match="out of order"):
            group.world.close(5.0)
    others = [each.state for each in groups if each is not groups[broken]]
    assert others == ["closed", "closed"]
    group.world.close(5.0)
    assert [each.state for each in groups] == ["closed"] * 3
    assert len(released) == 1


def test_an_exception_in_a_block_closes_all_groups_though_one_cannot_be_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, channel = null_group()
    part = group.subgroup([0, 1])
    monkeypatch.setattr(channel, "abort", _fail)
    with pytest.raises(RuntimeError, match="out of order"), group:
        raise KeyError("the program's own")
    assert (group.state, part.state) == ("closed", "closed")
    backend: Any = group._backend
    assert backend.channels[1].broken is not None


def test_a_world_is_not_half_closed_by_a_timeout_that_makes_no_sense() -> None:
    group, _ = null_group()
    seconds: Any
    for seconds in (-1, 0, math.nan, None, "5"):
        with pytest.raises(UsageError, match="timeout="):
            group.world.close(seconds)
    assert group.state == "open"
    with group.subgroup([1]) as part:
        assert part.state == "open"
    group.close()


def test_the_connections_go_if_the_meeting_cannot_be_left() -> None:
    closed: list[float] = []
    told: list[BaseException] = []

    class Closing(NullBackend):
        def close(self, timeout: float) -> None:
            closed.append(timeout)

    def cannot_leave() -> None:
        raise StoreError("the store is gone")

    group, _ = null_group()
    membership = replace(group.world.membership, connected=cannot_leave, abandon=told.append)
    with pytest.raises(StoreError, match="is gone"):
        World.connect(membership, lambda membership, timeout: Closing(), timeout=5.0, options={})
    group.close()
    assert len(closed) == 1
    assert [type(error) for error in told] == [StoreError]
