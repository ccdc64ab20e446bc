"""Batches of messages, and messages beside collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.backend.base import DataChannel
from shoal.errors import UsageError
from shoal.future import Future, wait_all
from shoal.group import Message, ProcessGroup
from shoal.spec import Operation, OpKind

from .null_backend import null_group
from .worlds import Worlds


def test_a_batch_exchanges_around_a_ring(worlds: Worlds) -> None:
    def ring(group: ProcessGroup) -> None:
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        theirs = torch.empty(4, 2).T
        with group.batch() as batch:
            batch.recv(theirs, left)
            batch.send(torch.full((2, 4), float(group.rank)), right)
            batch.send(torch.tensor([group.rank]), right, tag=5)
            batch.recv(None, left, tag=5)
        values = batch.wait(20)
        assert values[0] is theirs
        assert values[1:3] == [None, None]
        assert values[3].tolist() == [left]
        assert theirs.eq(left).all()
        assert len(batch.futures) == 4

    worlds(3).run(ring)


def test_a_batch_is_submitted_at_its_end_and_in_order() -> None:
    group, channel = null_group()
    with group.batch() as batch:
        batch.send(torch.ones(1), 0)
        batch.recv(None, 2)
        assert channel.operations == []
        with pytest.raises(UsageError, match="when its `with` block has ended"):
            _ = batch.futures
    assert [operation.peer for operation in channel.operations] == [0, 2]
    with pytest.raises(UsageError, match="submitted already"):
        batch.send(torch.ones(1), 0)
    with pytest.raises(UsageError, match="submitted already"), batch:
        pass
    group.close()


def test_a_batch_with_bad_input_sends_nothing() -> None:
    group, channel = null_group()
    batch = group.batch()

    def exchange() -> None:
        with batch:
            batch.send(torch.ones(1), 0)
            batch.send(torch.ones(1), 1)

    with pytest.raises(UsageError, match=r"batch\.send on rank 1: dst is this rank itself"):
        exchange()
    assert channel.operations == []
    assert batch.futures == []
    group.close()


def test_a_batch_of_plain_tensors_takes_the_fast_path_after_the_first(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(group: ProcessGroup) -> list[int]:
        peer = 1 - group.rank
        slow: list[int] = []
        submit = group._submitter.submit_messages

        def counted(messages: Sequence[Operation]) -> list[Future[Any]]:
            slow.append(len(messages))
            return submit(messages)

        monkeypatch.setattr(group._submitter, "submit_messages", counted)
        for plain in (True, True, False):
            first, second = torch.zeros(2), torch.zeros(2) if plain else torch.zeros(2, 2)[:, 0]
            with group.batch() as batch:
                batch.send(torch.full((2,), 1.0 + group.rank), peer)
                batch.recv(first, peer)
                batch.send(torch.full((2,), 3.0 + group.rank), peer)
                batch.recv(second, peer)
            values = batch.wait(20)
            assert values[0] is values[2] is None
            assert values[1] is first
            assert values[3] is second
            assert [first.tolist(), second.tolist()] == [[1.0 + peer] * 2, [3.0 + peer] * 2]
        return slow

    assert worlds(2).run(exchange) == [[1, 1, 4]] * 2


def test_messages_overtake_collectives_that_wait(worlds: Worlds) -> None:
    def exchange(group: ProcessGroup) -> None:
        if group.rank == 0:
            total = group.all_reduce(torch.ones(1))
            group.send(torch.tensor([7]), 1).wait()
        else:
            assert group.recv(None, 0).wait().tolist() == [7]
            total = group.all_reduce(torch.ones(1))
        assert total.wait().item() == 2.0

    worlds(2).run(exchange)


def test_a_message_tells_who_sent_it(worlds: Worlds) -> None:
    def exchange(group: ProcessGroup) -> None:
        if group.rank == 0:
            buffer = torch.empty(2, dtype=torch.int64)
            message = group.recv_message(buffer, tag=3).wait()
            assert isinstance(message, Message)
            assert message.tensor is buffer
            assert (message.source, message.tag) == (1, 3)
        else:
            group.send(torch.tensor([1, 2]), 0, tag=3).wait()

    worlds(2).run(exchange)


def test_many_messages_are_in_flight_both_ways(worlds: Worlds) -> None:
    def exchange(group: ProcessGroup) -> None:
        peer = 1 - group.rank
        sent = [group.send(torch.full((100,), i), peer) for i in range(300)]
        received = [group.recv(None, peer) for _ in range(300)]
        assert [int(x[0]) for x in wait_all(received)] == list(range(300))
        wait_all(sent)

    worlds(2).run(exchange)


@pytest.mark.parametrize(
    "shape", [(2,) * 9, (1,) * 60, (3, 0, 1, 5, 1, 1, 1, 1, 1, 200), (1,) * 10 + (70_000,), (4,) * 8]
)
def test_a_message_of_many_dimensions_keeps_its_shape(worlds: Worlds, shape: tuple[int, ...]) -> None:
    def exchange(group: ProcessGroup) -> torch.Tensor:
        if group.rank == 0:
            group.send(torch.arange(math.prod(shape)).view(shape), 1).wait()
            return torch.arange(math.prod(shape)).view(shape)
        return group.recv(None, 0).wait()

    sent, received = worlds(2).run(exchange)
    assert received.shape == shape
    assert received.equal(sent)


def test_a_shape_that_no_header_holds_is_refused(worlds: Worlds) -> None:
    def send(group: ProcessGroup) -> str:
        if group.rank == 0:
            with pytest.raises(UsageError, match="send a view of fewer dimensions"):
                group.send(torch.ones((1,) * 64), 1)
        return group.state

    assert worlds(2).run(send) == ["open", "open"]


@pytest.mark.parametrize("wrong", ["send", "recv"])
def test_a_batch_sends_nothing_if_the_channel_refuses_one_message(worlds: Worlds, wrong: str) -> None:
    def exchange(group: ProcessGroup) -> list[int]:
        flat, peer = torch.ones((1,) * 64), 1 - group.rank
        if group.rank == 0:
            batch = group.batch()
            batch.send(torch.tensor([1]), peer)
            with pytest.raises(UsageError, match="send a view of fewer dimensions"), batch:
                batch.send(flat, peer) if wrong == "send" else batch.recv(flat, peer)
            group.send(torch.tensor([2]), peer).wait()
            return []
        return group.recv(None, peer).wait().tolist()  # of the refused batch it would be [1]

    assert worlds(2).run(exchange) == [[], [2]]


def test_a_channel_may_refuse_a_collective_before_it_gets_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DataChannel, operation: Operation) -> None:
        if operation.kind is OpKind.BARRIER:
            raise UsageError("this channel has no barrier")

    group, channel = null_group()
    monkeypatch.setattr(type(channel), "check", refuse)
    with pytest.raises(UsageError, match="no barrier"):
        group.barrier()
    group.all_reduce(torch.ones(1))
    assert [(operation.kind, operation.number) for operation in channel.operations] == [
        (OpKind.ALL_REDUCE, 0)
    ]
    group.close()
