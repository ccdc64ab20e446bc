"""How a group ends: closed, aborted, or by an exception, from any thread, any number of times."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from shoal.errors import ForkedProcess, GroupAborted, GroupClosed, GroupError, PeerLost, RemoteError
from shoal.group import GroupState, ProcessGroup
from shoal.testing import faults, run_threads
from tests.support.waiting import until

from .null_backend import NullBackend, null_group

PATIENCE = 20.0


def test_a_group_knows_who_it_is() -> None:
    group, _ = null_group()
    assert (group.rank, group.size, group.ranks, group.name) == (1, 4, (0, 1, 2, 3), "null")
    assert (group.local_rank, group.timeout, group.state) == (0, 9.0, "open")
    assert repr(group) == "<ProcessGroup 'null': rank 1 of 4, open>"
    group.close()
    assert repr(group) == "<ProcessGroup 'null': rank 1 of 4, closed>"


def test_a_state_is_an_enumeration_that_is_equal_to_its_string() -> None:
    group, _ = null_group()
    assert group.state is GroupState.OPEN
    assert (f"{group.state}", str(group.state), json.dumps(group.state)) == ("open", "open", '"open"')
    assert {"open": 1}[group.state] == 1
    group.close()
    assert group.state is GroupState("closed")
    assert not issubclass(ForkedProcess, GroupError)


def test_close_ends_everything_once_and_within_its_timeout() -> None:
    released: list[float] = []
    group, channel = null_group(owner=released.append)
    group.close(timeout=3)
    group.close()
    assert len(released) == len(channel.closed_within) == 1
    assert 0 < released[0] <= 3
    assert 0 < channel.closed_within[0] <= 3
    assert group.state == "closed"
    with pytest.raises(GroupClosed, match="group 'null' on rank 1 is closed"):
        group.all_reduce(torch.ones(1))
    with pytest.raises(GroupClosed):
        group.empty(3)
    with pytest.raises(GroupClosed):
        group.subgroup([1])


def test_connections_are_released_even_if_the_channel_cannot_be_closed() -> None:
    released: list[float] = []
    group, channel = null_group(owner=released.append)

    def fail(timeout: float) -> None:
        raise RuntimeError("no")

    channel.close = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        group.close()
    assert len(released) == 1
    assert group.state == "closed"


def test_a_second_close_waits_for_the_first() -> None:
    group, channel = null_group()
    inside, go_on = threading.Event(), threading.Event()

    def slow(timeout: float) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    channel.close = slow  # type: ignore[method-assign]
    first = threading.Thread(target=group.close)
    first.start()
    assert inside.wait(PATIENCE)
    assert group.state == "closing"
    with pytest.raises(GroupClosed, match="is closing"):
        group.barrier()
    states: list[str] = []

    def second_close() -> None:
        group.close()
        states.append(group.state)

    second = threading.Thread(target=second_close)
    second.start()
    assert states == []
    go_on.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert states == ["closed"]


def test_abort_reaches_a_group_that_hangs_in_close() -> None:
    group, channel = null_group()
    inside, aborted = threading.Event(), threading.Event()

    def hang(timeout: float) -> None:
        inside.set()
        assert aborted.wait(PATIENCE)

    channel.close = hang  # type: ignore[method-assign]
    channel.abort = lambda reason: aborted.set()  # type: ignore[method-assign]
    closing = threading.Thread(target=group.close)
    closing.start()
    assert inside.wait(PATIENCE)
    group.abort("enough")
    closing.join(PATIENCE)
    assert group.state == "closed"


def test_an_abort_that_a_close_overtakes_leaves_the_group_closed() -> None:
    group, channel = null_group()
    asked, closed = threading.Event(), threading.Event()

    def failure() -> None:
        asked.set()
        assert closed.wait(PATIENCE)

    channel.failure = failure  # type: ignore[method-assign]
    aborting = threading.Thread(target=group.abort, args=("too late",))
    aborting.start()
    assert asked.wait(PATIENCE)
    group.close()
    closed.set()
    aborting.join(PATIENCE)
    assert group.state == "closed"
    group.close()


def test_an_aborted_group_says_why_and_can_be_closed() -> None:
    group, _ = null_group()
    group.abort("the user pressed a button")
    assert group.state == "aborted"
    with pytest.raises(GroupAborted, match="the user pressed a button"):
        group.barrier()
    group.abort("again")
    group.close()
    assert group.state == "closed"
    group.abort("too late")
    assert group.state == "closed"


def test_what_broke_a_group_first_stays_its_state() -> None:
    group, channel = null_group()
    channel.broken = PeerLost("rank 3 died", [3])
    group.abort("because of that")
    assert group.state == "broken"
    with pytest.raises(PeerLost):
        group.barrier()
    group.close()


def test_an_exception_that_leaves_the_block_is_what_the_others_hear() -> None:
    def fail(group: ProcessGroup) -> None:
        part = group.split(0)
        assert part is not None
        if group.rank == 1:
            with group:
                raise KeyError("broken here")
        for own in (group, part):
            with pytest.raises(GroupAborted, match="on rank 1: KeyError\\('broken here'\\)"):
                own.recv(None, 1).wait()
        part.close()

    with pytest.raises(RemoteError, match="1 of 2 ranks failed, rank 1 first"):
        run_threads(fail, 2, timeout=30)


def _part(group: ProcessGroup) -> ProcessGroup:
    part = group.split(0)
    assert part is not None
    return part


def test_a_block_raises_what_ended_the_group_if_no_call_has_raised_it() -> None:
    def rank(group: ProcessGroup) -> str:
        part = _part(group)

        def end() -> None:
            with part:
                pending = part.all_reduce(torch.ones(1)) if group.rank == 0 else None  # nobody waits for it
                group.barrier().wait()
                if group.rank == 1:
                    part.abort("the disk is full")
                until(lambda: part.state != "open")
                del pending

        if group.rank == 1:
            end()  # this rank has aborted it
            return ""
        with pytest.raises(GroupAborted, match=r"rank 0 was aborted: .*the disk is full") as raised:
            end()
        assert part.state == "closed"
        return str(raised.value)

    run_threads(rank, 2)


def test_one_block_raises_the_loss_of_a_peer_that_no_call_has_met() -> None:
    def rank(group: ProcessGroup) -> None:
        part = _part(group)

        def end() -> None:
            with part:
                until(lambda: part.state == group.state == "broken")

        if group.rank == 1:
            faults.disconnect(group, 0)
        with pytest.raises(PeerLost, match=r"world/split:.*' on rank . is broken: "):
            end()

    run_threads(rank, 2)  # whose block, of the group of all ranks, does not raise it again


@pytest.mark.parametrize("way", ["wait", "submit", "agree"])
def test_a_block_does_not_repeat_what_a_call_has_reported(way: str) -> None:
    def rank(group: ProcessGroup) -> None:
        part = _part(group)
        with part:
            future = part.all_reduce(torch.ones(1)) if way == "wait" and group.rank == 0 else None
            group.barrier().wait()
            if group.rank == 1:
                part.abort("enough")
                return
            until(lambda: part.state != "open")
            if way == "agree":
                part.agree(1)
                return
            with pytest.raises(GroupAborted):
                part.barrier() if future is None else future.wait()

    run_threads(rank, 2)


def test_an_orderly_exit_of_the_program_is_no_failure() -> None:
    for code in (None, 0):
        group, channel = null_group()
        with pytest.raises(SystemExit), group:
            raise SystemExit(code)
        assert channel.broken is None
        assert group.state == "closed"
    group, channel = null_group()
    with pytest.raises(SystemExit), group:
        raise SystemExit(3)
    assert isinstance(channel.broken, GroupAborted)


@pytest.mark.concurrency
def test_threads_that_submit_while_the_group_is_closed_get_an_answer() -> None:
    group, channel = null_group()
    endings: list[type[BaseException]] = []

    def submit() -> None:
        try:
            while True:
                group.barrier()
        except GroupError as error:
            endings.append(type(error))

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(channel.operations) < 100:
        pass
    group.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert endings == [GroupClosed] * 3


def test_a_group_that_became_forked_refuses_everything_but_closing() -> None:
    group, channel = null_group()
    with group._submitter.lock:  # held by a thread that the child does not have
        group._become_forked()
    for call in (group.barrier, lambda: group.empty(1), lambda: group.send(torch.ones(1), 0)):
        with pytest.raises(ForkedProcess, match="or fork before"):
            call()
    assert group.state == "forked"
    group.abort("not ours")
    group.close()
    assert channel.closed_within == []
    assert channel.broken is None
    assert isinstance(group._backend, NullBackend)
