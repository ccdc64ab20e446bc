"""What still comes for an operation that was cancelled never gets into memory that its owner has back."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal import _core
from tests.support.waiting import until

from .test_frames import (
    EAGER,
    GRANT,
    GROUP,
    HEARTBEAT,
    MESSAGE,
    MORE,
    PATIENCE,
    RECV,
    SEND,
    WITHDRAWN,
    ErrorCode,
    Frame,
    Rank,
    control,
    ours,
    shape,
)

DECLINED = 1
LONG = 2 * EAGER  # bytes, of which the first frame has half
GIVEN_BACK = 7.0


def first(**fields: Any) -> Frame:
    """The first frame of a message of :data:`LONG` bytes, full of ones."""
    ones = torch.ones(EAGER // 4).numpy().tobytes()
    return Frame(**{"total": LONG, "rest": shape(LONG // 4), "payload": ones, **fields})


def rest(**fields: Any) -> Frame:
    return first(type=MORE, **fields)


def withdrawn(**fields: Any) -> Frame:
    return control(WITHDRAWN, **{"channel": Frame().channel, "message": 1, **fields})


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def receive(rank: Rank, x: torch.Tensor) -> Any:
    return rank.group.message(RECV, [(x.data_ptr(), x.nbytes)], 1, 1, 1, [x.numel()], PATIENCE)


def heard(peer: socket.socket) -> tuple[int, int]:
    """Type and code of the next frame that is no heartbeat."""
    kind = HEARTBEAT
    while kind == HEARTBEAT:
        header = exactly(peer, 128)
        assert header[:4] == b"SHOL"
        kind, code = (int.from_bytes(header[at : at + 2], "little") for at in (4, 6))
        if kind == HEARTBEAT:  # with a report
            exactly(peer, int.from_bytes(header[8:12], "little"))
    return kind, code


def exactly(peer: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        part = peer.recv(count - len(got))
        assert part, "the connection ended"
        got += part
    return got


def meet(rank: Rank, message: int) -> None:
    """Everything that was sent before has arrived, and was in order."""
    rank.send(Frame(channel=Frame().channel + 98, message=message))
    assert rank.receive(rank.group, tag=99).error() is None


def test_the_rest_of_a_message_that_was_granted_is_dropped(rank: Rank) -> None:
    x = torch.zeros(LONG // 4)
    operation = receive(rank, x)
    rank.send(first())
    assert heard(rank.peer) == (GRANT, 0)
    assert operation.cancel()
    x.fill_(GIVEN_BACK)
    rank.send(rest())
    meet(rank, 2)
    assert bool((x == GIVEN_BACK).all())
    assert operation.error().code is ErrorCode.CANCELLED
    assert not rank.group.broken()


def test_a_frame_that_is_half_read_goes_nowhere_and_its_sender_is_told(rank: Rank) -> None:
    x = torch.zeros(LONG // 4)
    operation = receive(rank, x)
    frame = first().encoded()
    rank.peer.sendall(frame[:100_000])
    deadline = time.monotonic() + PATIENCE
    while x[0] == 0 and time.monotonic() < deadline:
        operation.wait(0.01)
    assert x[0] == 1
    assert operation.cancel()
    x.fill_(GIVEN_BACK)
    rank.peer.sendall(frame[100_000:])
    assert heard(rank.peer) == (GRANT, DECLINED)
    meet(rank, 2)
    assert bool((x == GIVEN_BACK).all())


def test_a_receive_whose_message_is_taken_back_waits_for_the_next(rank: Rank) -> None:
    x = torch.zeros(LONG // 4)
    operation = receive(rank, x)
    rank.send(first())
    assert heard(rank.peer) == (GRANT, 0)
    rank.send(withdrawn())
    twos = torch.full((EAGER // 4,), 2.0).numpy().tobytes()
    rank.send(first(message=2, payload=twos))
    assert heard(rank.peer) == (GRANT, 0)
    rank.send(rest(message=2, payload=twos))
    assert operation.wait(PATIENCE)
    assert operation.error() is None
    assert bool((x == 2).all())


def test_the_rest_of_a_message_that_was_taken_back_ends_the_connection(rank: Rank) -> None:
    x = torch.zeros(LONG // 4)
    operation = receive(rank, x)
    rank.send(first())
    assert heard(rank.peer) == (GRANT, 0)
    rank.send(withdrawn(), rest())
    assert operation.wait(PATIENCE)
    assert operation.error().code is ErrorCode.WIRE
    assert bool((x[EAGER // 4 :] == 0).all())


@pytest.mark.parametrize("by", ["its sender", "its sender's death"])
def test_an_unread_message_that_is_taken_back_is_dropped(by: str) -> None:
    rank = Rank()
    try:
        rank.send(first(), Frame(channel=Frame().channel + 98, message=2))
        assert rank.receive(rank.group, tag=99).error() is None
        assert rank.context.held()[1] == 1
        if by == "its sender":
            rank.send(withdrawn())
            meet(rank, 3)
        else:
            rank.peer.close()
            assert rank.receive(rank.group).error().code is ErrorCode.PEER_LOST
        until(lambda: rank.context.held()[1] == 0)
    finally:
        rank.close()


def test_a_message_that_was_taken_back_is_not_sent_when_it_is_granted_late(rank: Rank) -> None:
    x = torch.ones(LONG // 4)
    dims = [x.numel()]
    operation = rank.group.message(SEND, [(x.data_ptr(), x.nbytes)], 1, 1, 1, dims, PATIENCE)
    assert heard(rank.peer) == (MESSAGE, 0)
    exactly(rank.peer, EAGER)
    assert operation.cancel()
    assert heard(rank.peer) == (WITHDRAWN, 0)
    x.fill_(GIVEN_BACK)
    rank.send(ours(GRANT, message=1))
    meet(rank, 1)
    small = rank.group.message(SEND, [(x.data_ptr(), 4)], 1, 2, 1, [1], PATIENCE)
    assert small.wait(PATIENCE)
    assert heard(rank.peer) == (MESSAGE, 0)  # the next message, and nothing of the first


def test_a_receive_from_anybody_forgets_the_half_message_of_one_that_died() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    context = _core.Context.make(0, 3, 3, 1 << 26, 1 << 26, 600.0)
    for peer, (here, there) in enumerate(ends, 1):
        context.add_remote(peer, here.detach())
        there.settimeout(PATIENCE)
    context.start()
    try:
        group = context.group(GROUP, "pairs", 0, [0, 1, 2], [0, 1, 2], 1, True)
        x = torch.zeros(LONG // 4)
        operation = group.message(RECV, [(x.data_ptr(), x.nbytes)], -1, 1, 1, [x.numel()], PATIENCE)
        doomed = group.message(RECV, [], 1, 2, 0, [], PATIENCE)
        ends[0][1].sendall(first().encoded()[:-10])
        ends[0][1].close()
        assert doomed.wait(PATIENCE)
        assert (doomed.error().code, doomed.error().ranks) == (ErrorCode.PEER_LOST, [1])
        assert context.lost() == [1]
        twos = torch.full((EAGER // 4,), 2.0).numpy().tobytes()
        ends[1][1].sendall(first(source=2, payload=twos).encoded())
        assert heard(ends[1][1]) == (GRANT, 0)
        ends[1][1].sendall(rest(source=2, payload=twos).encoded())
        assert operation.wait(PATIENCE)
        assert operation.error() is None
        assert bool((x == 2).all())
        assert not group.broken()
    finally:
        for _, there in ends:
            there.close()
        context.close(PATIENCE)
