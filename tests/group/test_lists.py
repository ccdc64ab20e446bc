"""Members that give different lists to ``subgroup`` are told who gave which."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import pytest
import torch

from shoal.errors import GroupAborted
from shoal.future import Future
from shoal.group import ProcessGroup
from shoal.group.diagnostics import member_lists as lists
from shoal.testing import run_threads

from .null_backend import null_group


def _ended_by(group: ProcessGroup) -> str:
    with group, pytest.raises(GroupAborted) as caught:
        group.all_reduce(torch.ones(1)).wait()
    return str(caught.value)


@pytest.mark.parametrize("name", [None, "tensor parallel"])
def test_both_sides_are_told_the_two_lists(name: str | None) -> None:
    def rank(group: ProcessGroup) -> str:
        if group.rank == 2:
            return ""
        return _ended_by(group.subgroup([0, 1] if group.rank == 0 else [1, 0], name, timeout=50))

    zero, one, _ = run_threads(rank, 3, timeout=40)
    for message in (zero, one):
        assert "rank 0 gave [0, 1]" in message
        assert "rank 1 gave [1, 0]" in message
        assert f"a subgroup{'' if name is None else repr(name).join((' ', ''))} of group 'world'" in message


def test_a_member_with_the_right_list_is_told_too() -> None:
    def rank(group: ProcessGroup) -> str:
        return _ended_by(group.subgroup([0, 1] if group.rank == 1 else [0, 1, 2], timeout=50))

    for message in run_threads(rank, 3, timeout=40):
        assert re.search(r"rank (0|2) gave \[0, 1, 2\]", message)
        assert "rank 1 gave [0, 1]" in message


def test_members_that_are_only_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    exchange = lists.MemberListChecker._exchange

    def look(self: lists.MemberListChecker, wait: lists._PendingConnect) -> object:
        others = exchange(self, wait)
        if others:
            looked.set()
        return others

    monkeypatch.setattr(lists.MemberListChecker, "_exchange", look)

    def rank(group: ProcessGroup) -> list[float]:
        with group.subgroup([0, 1]) as first, group.subgroup([1, 0]) as second:
            groups = [first, second] if group.rank == 0 else [second, first]  # each waits in another one
            futures = [groups[0].all_reduce(torch.ones(1))]
            assert looked.wait(30)
            futures.append(groups[1].all_reduce(torch.ones(1)))
            return [future.wait().item() for future in futures]

    assert run_threads(rank, 2, timeout=40) == [[2.0, 2.0]] * 2


def test_nobody_watches_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "CHECK_DELAY_S", 600.0)  # the ranks may stand still for half a second

    def rank(group: ProcessGroup) -> bool:
        with group.subgroup([0, 1]) as part:
            for _ in range(3):
                part.all_reduce(torch.ones(1)).wait()
            watch = group._lists
            with watch._condition:
                thread = watch._thread
                for wait in watch._pending:
                    wait.due = 0.0
                watch._condition.notify()
            assert thread is not None
            thread.join(30)
            return watch._thread is None and not group.store.list_keys("subgroups")

    assert run_threads(rank, 2, timeout=40) == [True, True]


def test_an_operation_goes_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group, channel = null_group()
    part = group.subgroup([1, 2])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    part.barrier()
    part.barrier()
    monkeypatch.undo()
    assert [operation.number for operation in group._backend.channels[1].operations] == [0, 1]
    assert channel.operations == []
    group.world.close(1.0)


def test_a_second_group_is_looked_at_in_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = {"first": threading.Event(), "second": threading.Event()}

    def look(self: lists.MemberListChecker, wait: lists._PendingConnect) -> bool:
        wait.due += 3600.0  # the thread sleeps
        looked[str(wait.given.name)].set()
        return False

    monkeypatch.setattr(lists.MemberListChecker, "_check", look)
    world, _ = null_group()
    watch = lists.MemberListChecker()
    pending: Future[None] = Future()
    for name, event in looked.items():
        watch.watch_operation(world, lists.SubgroupCall(name, "", (0, 1), 1), world._submitter, pending)
        assert event.wait(30), name
    watch.unwatch(world._submitter, 30)
    world.close()


def test_a_subgroup_is_free_when_it_is_closed_though_nobody_looks_for_cycles() -> None:
    world, _ = null_group()
    gc.disable()
    try:
        part = world.subgroup([1, 2])
        gone = weakref.ref(part)
        part.close()
        del part
        assert gone() is None
    finally:
        gc.enable()
        world.close()
