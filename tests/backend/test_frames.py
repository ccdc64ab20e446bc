"""Every field of a frame is checked before anything acts on it: a peer that lies loses its connection.

The peer is a bare socket behind one rank of the core, so that it can send what no shoal would.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from shoal import _core
from shoal.backend.native.channel import pack_shape
from shoal.backend.native.errors import exception_of
from shoal.errors import GroupError, ProtocolError, WireError

PATIENCE = 30.0
GROUP, LATE = 77, 78

MESSAGE, MORE, GRANT, QUERY, REPLY, BROKEN, CLOSED, BYE, HEARTBEAT, CREDIT = range(1, 11)
ErrorCode = _core.ErrorCode
WITHDRAWN = 12
SEND, RECV, ALL_REDUCE, BARRIER = 10, 11, 1, 9
FLOAT32 = 1
P2P = 1 << 63
EAGER = 256 * 1024
WINDOW = 8 << 20


def call(kind: int = ALL_REDUCE, dtype: int = FLOAT32, op: int = 0, root: int = -1, lanes: int = 1) -> bytes:
    return struct.pack("<BBBBiQQdQ", kind, dtype, op, lanes, root, 100, 0, 1.0, 0).ljust(72, b"\0")


def shape(*sizes: int, dtype: int = FLOAT32, dims: int | None = None) -> bytes:
    head = struct.pack("<BB6x", dtype, len(sizes) if dims is None else dims)
    return (head + struct.pack(f"<{len(sizes)}Q", *sizes)).ljust(72, b"\0")


def broken(
    text: bytes = b"",
    ranks: Sequence[int] = (),
    lost: Sequence[tuple[int, int, bytes]] = (),
    reporter: int = -1,
) -> bytes:
    """The payload of a BROKEN frame, see cpp/engine/error.h."""
    losses = b"".join(struct.pack("<iiI", *loss[:2], len(loss[2])) + loss[2] for loss in lost)
    head = struct.pack(f"<I{len(ranks)}i", len(ranks), *ranks)
    return head + struct.pack("<I", len(lost)) + losses + struct.pack("<iI", reporter, 0) + text


def check_cut_off(error: _core.Error) -> None:
    """The connection to rank 1 was cut because of what it sent."""
    assert (error.code, error.ranks) == (ErrorCode.WIRE, [1])
    text = error.explain(0, "the group")
    assert "rank 1 is lost: it sent " in text
    assert "reported by" not in text


@dataclass(frozen=True)
class Frame:
    """A legal message with tag 1 and five floats, unless told otherwise."""

    type: int = MESSAGE
    code: int = 0
    source: int = 1
    group: int = GROUP
    channel: int = P2P | 1
    message: int = 1
    total: int = 20
    step: int = 0
    late: int = 0
    rest: bytes = shape(5)
    payload: bytes = bytes(20)
    claimed: int | None = None  # another length than that of the payload
    magic: int = 0x4C4F4853

    def encoded(self) -> bytes:
        size = len(self.payload) if self.claimed is None else self.claimed
        fields = (self.magic, self.type, self.code, size, self.source, self.group, self.channel)
        tail = (self.message, self.total, self.step, self.late, self.rest)
        return struct.pack("<IHHIIQQQQII72s", *fields, *tail) + self.payload


def control(type: int, **fields: Any) -> Frame:
    none = {"channel": 0, "message": 0, "total": 0, "rest": bytes(72), "payload": b""}
    return Frame(type, **{**none, **fields})


def ours(type: int, **fields: Any) -> Frame:
    return control(type, **{"source": 0, "group": 0, **fields})


COLLECTIVE = Frame(channel=0, total=400, rest=call(), payload=bytes(400))
WITHHELD = Frame(code=1, payload=b"")

#: What is wrong -> the frames, the last of which is refused.
LIES: dict[str, list[Frame]] = {
    "not a frame": [Frame(magic=0)],
    "type 0": [Frame(0)],
    "unknown type": [Frame(11)],
    "a message with someone late": [Frame(late=1)],
    "a late rank that is none": [replace(COLLECTIVE, late=9)],
    "unknown code": [Frame(code=2, payload=b"")],
    "longer than any frame": [Frame(total=1 << 30, rest=shape(1 << 28), payload=b"", claimed=EAGER + 1)],
    "shorter than its message": [Frame(claimed=16, payload=bytes(16))],
    "no bytes of a message of one": [Frame(total=0, rest=shape(1), payload=b"")],
    "bytes of a message of none": [Frame(rest=shape(0))],
    "a length that overflows": [Frame(total=0, rest=shape(1 << 62, 4), payload=b"")],
    "an empty shape that overflows": [Frame(total=0, rest=shape(0, 1 << 62, 4), payload=b"")],
    "longer than memory": [Frame(total=1 << 60, rest=shape(1 << 58), payload=b"", claimed=EAGER)],
    "unknown dtype": [Frame(rest=shape(5, dtype=20))],
    "dtype 255": [Frame(rest=shape(5, dtype=255))],
    "nine dimensions": [Frame(rest=shape(5, 1, 1, 1, 1, 1, 1, 1, dims=9))],
    "sizes beyond its dimensions": [Frame(rest=shape(5, 7, dims=1))],
    "a packed shape that never ends": [Frame(rest=shape(*[(1 << 64) - 1] * 8))],
    "a packed shape of two": [Frame(rest=shape(2 | 5 << 8, *[0] * 6, 1 << 63))],
    "a step of a message": [Frame(step=1)],
    "a name out of turn": [Frame(message=2)],
    "the same name again": [Frame(), Frame()],
    "another's name": [Frame(source=0)],
    "no rank": [Frame(source=0x7FFFFFF0)],
    "a negative rank": [Frame(source=0xFFFFFFFF)],
    "more than its window": [Frame(message=i, total=EAGER, rest=shape(EAGER // 4), payload=bytes(EAGER))
                             for i in range(1, WINDOW // EAGER + 1)],
    "a call of no kind": [replace(COLLECTIVE, rest=call(kind=0))],
    "a call of a message's kind": [replace(COLLECTIVE, rest=call(kind=SEND))],
    "a call with an unknown dtype": [replace(COLLECTIVE, rest=call(dtype=20))],
    "a call with an unknown reduction": [replace(COLLECTIVE, rest=call(op=9))],
    "a call of no lanes": [replace(COLLECTIVE, rest=call(lanes=0))],
    "a call with a root outside": [replace(COLLECTIVE, rest=call(root=2))],
    "a call and more": [replace(COLLECTIVE, rest=call()[:40] + b"\1" + bytes(31))],
    "the rest of nothing": [Frame(MORE)],
    "the rest of a whole message": [Frame(), Frame(MORE)],
    "a grant of nothing": [ours(GRANT, message=1)],
    "a grant in a group": [ours(GRANT, message=1, group=GROUP)],
    "credit that was not lent": [ours(CREDIT, total=1)],
    "a question about a message": [control(QUERY, channel=P2P)],
    "a question with a wrong call": [control(QUERY, code=1, rest=call(dtype=20))],
    "a question in another's name": [control(QUERY, source=0x7FFFFFF0)],
    "a reply of no kind": [control(REPLY, code=3)],
    "a reply in another's name": [control(REPLY, source=5)],
    "an end without a cause": [control(BROKEN, payload=broken())],
    "an end of an unknown cause": [control(BROKEN, code=99, payload=broken())],
    "an end with a text too long": [control(BROKEN, code=4, payload=bytes(65537))],
    "an end by ranks outside": [control(BROKEN, code=1, payload=broken(ranks=[0, 2_000_000_000]))],
    "an end by a negative rank": [control(BROKEN, code=1, payload=broken(ranks=[-1]))],
    "an end by the loss of a rank outside": [control(BROKEN, code=1, payload=broken(lost=[(2, -1, b"")]))],
    "an end with a reporter outside the ranks": [control(BROKEN, code=1, payload=broken(reporter=2))],
    "a loss with a reporter outside the ranks": [control(BROKEN, code=1, payload=broken(lost=[(1, 9, b"")]))],
    "an end that breaks off in a rank number": [control(BROKEN, code=1, payload=broken(ranks=[1])[:7])],
    "a rank count beyond the end": [control(BROKEN, code=1, payload=struct.pack("<I", 1 << 31))],
    "a cause of a rank beyond the end": [
        control(BROKEN, code=1, payload=struct.pack("<IIiiI", 0, 1, 1, -1, 0xFFFFFFF0) + bytes(40))
    ],
    "a subject of a rank beyond the end": [
        control(BROKEN, code=4, payload=struct.pack("<IIiI", 0, 0, -1, 5) + b"four")
    ],
    "an end in another's name": [control(BROKEN, code=4, source=0x7FFFFFF0, payload=broken())],
    "a goodbye in another's name": [control(CLOSED, source=0x7FFFFFF0)],
    "a goodbye with a text": [control(CLOSED, payload=b"x")],
    "a goodbye for an unknown reason": [control(CLOSED, code=2)],
    "a departure with a text": [ours(BYE, payload=b"x")],
    "a departure for an unknown reason": [ours(BYE, code=2)],
    "a heartbeat with a number": [ours(HEARTBEAT, step=1)],
    "a heartbeat with someone late": [ours(HEARTBEAT, late=1)],
    "half a report": [ours(HEARTBEAT, payload=bytes(32))],
    "a withdrawal of nothing": [control(WITHDRAWN, message=1)],
    "a withdrawal with a length": [Frame(), control(WITHDRAWN, message=1, total=20)],
}  # fmt: skip

#: What is found out only when the group is known.
OF_THE_GROUP = [name for name in LIES if "another's name" in name or "rank" in name or "root" in name]
OF_THE_GROUP.remove("a reply in another's name")  # nobody asked, so it is dropped


class Rank:
    """Rank 0 of 2 in the core, and the other side of its connection."""

    def __init__(self) -> None:
        here, self.peer = socket.socketpair()
        self.peer.settimeout(PATIENCE)
        self.context = _core.Context.make(0, 2, 2, 1 << 26, 1 << 26, 600.0)
        self.context.add_remote(1, here.detach())
        self.context.start()
        self.group = self.make(GROUP)

    def make(self, ident: int) -> Any:
        return self.context.group(ident, "pair", 0, [0, 1], [0, 1], 1)

    def send(self, *frames: Frame) -> None:
        with contextlib.suppress(ConnectionError):  # a frame may be refused before all of it was sent
            for frame in frames:
                self.peer.sendall(frame.encoded())

    def receive(self, group: Any, tag: int = 1) -> Any:
        operation = group.message(RECV, [], 1, tag, 0, [], PATIENCE)
        assert operation.wait(PATIENCE)
        return operation

    def heard(self) -> bytes:
        """Everything until the connection ends."""
        data = b""
        with contextlib.suppress(ConnectionResetError):  # what was sent and not read
            while part := self.peer.recv(65536):
                data += part
        return data

    def close(self) -> None:
        self.peer.close()
        self.context.close(PATIENCE)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


@pytest.mark.parametrize("lie", LIES)
def test_a_frame_that_cannot_be_ends_the_connection(rank: Rank, lie: str) -> None:
    rank.send(*LIES[lie])
    rank.heard()
    operation = rank.receive(rank.group, tag=2)
    check_cut_off(operation.error())
    error = exception_of(operation.error(), 0, "pair")
    assert isinstance(error, ProtocolError)
    assert re.match(r"recv .* on rank 0 of group 'pair' .* failed: rank 1 is lost: it sent ", str(error))
    assert isinstance(error, (WireError, GroupError))
    assert error.ranks == (1,)


@pytest.mark.parametrize("lie", OF_THE_GROUP)
def test_a_frame_that_came_before_its_group_is_checked_when_the_group_is_made(rank: Rank, lie: str) -> None:
    rank.send(*(replace(frame, group=LATE) for frame in LIES[lie]))
    messages = sum(frame.type == MESSAGE for frame in LIES[lie])
    rank.send(Frame(message=messages + 1))
    assert rank.receive(rank.group).error() is None  # so what was sent before has arrived, too
    late = rank.make(LATE)
    rank.heard()
    assert rank.receive(late).error().code is ErrorCode.WIRE
    assert rank.receive(rank.group, tag=2).error().code is ErrorCode.WIRE


@pytest.mark.parametrize("lie", OF_THE_GROUP)
def test_a_group_ends_by_such_a_frame_of_a_peer_that_has_left_since(rank: Rank, lie: str) -> None:
    rank.send(*(replace(frame, group=LATE) for frame in LIES[lie]))
    rank.send(control(CLOSED, group=LATE, channel=9), ours(BYE))
    rank.peer.close()
    assert (
        rank.receive(rank.group).error().code is ErrorCode.CLOSED
    )  # so the goodbyes have arrived, and all before them
    late = rank.make(LATE)
    barrier = late.collective(BARRIER, [], [], 0, 0, 0, -1, [], 0, 0, PATIENCE / 3)
    assert barrier.wait(PATIENCE)
    check_cut_off(barrier.error())


def test_the_frames_that_lies_are_made_of_are_legal(rank: Rank) -> None:
    text = control(BROKEN, code=4, group=LATE, payload=broken(b"because of \xff\xfe", ranks=[1]))
    rank.send(
        Frame(), ours(HEARTBEAT), ours(HEARTBEAT, payload=b"\xff" * 64), control(QUERY),
        control(QUERY, code=1, rest=call()), control(REPLY), text,
    )  # fmt: skip
    rank.send(replace(WITHHELD, message=2), Frame(message=3, total=0, rest=shape(0), payload=b""))
    first = rank.receive(rank.group)
    assert first.error() is None
    message = first.received()
    assert (message.source, message.tag, message.dtype, message.dims) == (1, 1, FLOAT32, [5])
    second = rank.group.message(RECV, [], 1, 1, 0, [], PATIENCE)
    rank.send(Frame(MORE, message=2, payload=bytes(range(20))))
    assert second.wait(PATIENCE)
    assert torch.from_dlpack(second.received().data).tolist() == list(range(20))
    assert rank.receive(rank.group).received().dims == [0]
    failure = rank.make(LATE).failure()
    assert (failure.code, failure.ranks) == (ErrorCode.ABORTED, [1])
    assert failure.explain(0, "late") == "because of \\xff\\xfe"
    assert not rank.group.broken()


def grown(frame: Frame, by: int) -> Frame:
    return replace(frame, payload=bytes(by))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda more: grown(more, 24),  # beyond the message
        lambda more: grown(more, 16),  # a part that is not cut as parts are
        lambda more: replace(more, total=16, payload=bytes(16)),  # of another length than was claimed
        lambda more: replace(more, group=LATE),
        lambda more: replace(more, rest=shape(1, 5)),
        lambda more: replace(more, code=1),
    ],
)
def test_the_rest_of_a_message_is_what_was_announced(rank: Rank, wrong: Callable[[Frame], Frame]) -> None:
    rank.send(WITHHELD)
    operation = rank.group.message(RECV, [], 1, 1, 0, [], PATIENCE)
    while True:
        header = rank.peer.recv(128, socket.MSG_WAITALL)
        rank.peer.recv(struct.unpack_from("<I", header, 8)[0], socket.MSG_WAITALL)
        if header[4] == GRANT:
            break
    rank.send(wrong(Frame(MORE)))
    assert operation.wait(PATIENCE)
    assert operation.error().code is ErrorCode.WIRE


@pytest.mark.parametrize("sizes", [[2] * 10, [1] * 30 + [3], [0] * 12, [1] * 9])
def test_a_shape_of_many_dimensions_is_legal(rank: Rank, sizes: list[int]) -> None:
    words = pack_shape(sizes)
    count = 1
    for size in sizes:
        count *= size
    rank.send(Frame(total=4 * count, rest=shape(*words), payload=bytes(4 * count)))
    operation = rank.receive(rank.group)
    assert operation.error() is None
    assert operation.received().dims == words


def test_memory_that_a_peer_could_cut_is_not_mapped() -> None:
    mine = _core.Context.make(0, 2, 2, 1 << 26, 1 << 26, 600.0)
    peer = _core.Context.make(1, 2, 2, 1 << 26, 1 << 26, 600.0)
    here, there = mine.make_ring(), peer.make_ring()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(peer.memory_fd, 4096)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 1 << 26)
    refused: list[tuple[type[Exception], tuple[int, int, int, int, int]]] = [
        (ConnectionError, (1, loose, 1 << 26, here, there)),
        (ConnectionError, (1, peer.memory_fd, 1 << 27, here, there)),
        (ConnectionError, (1, peer.memory_fd, 1 << 26, here, (1 << 26) - 4096)),
        (ConnectionError, (1, peer.memory_fd, 1 << 26, here, there + 1)),
        (ConnectionError, (1, peer.memory_fd, 1 << 26, 1 << 60, there)),
        (ValueError, (0, peer.memory_fd, 1 << 26, here, there)),
        (ValueError, (2, peer.memory_fd, 1 << 26, here, there)),
        (ValueError, (-1, peer.memory_fd, 1 << 26, here, there)),
    ]
    for kind, (rank, fd, capacity, out, in_) in refused:
        with pytest.raises(kind):
            mine.add_local(rank, -1, fd, capacity, out, in_, 0)
    os.close(loose)
