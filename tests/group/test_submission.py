"""What a channel is given: numbers, keys, and tensors that it can use."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.errors import GroupClosed, PeerLost
from shoal.future import Future
from shoal.group import ProcessGroup
from shoal.spec import ANY_SOURCE, OpKind

from .null_backend import null_group


def test_collectives_are_numbered_in_the_order_of_submission_and_messages_are_not() -> None:
    group, channel = null_group()
    group.barrier()
    group.send(torch.ones(1), 0)
    group.all_reduce(torch.ones(1))
    group.recv(None, ANY_SOURCE)
    group.broadcast(torch.ones(1), 2)
    kinds = [(operation.kind, operation.number) for operation in channel.operations]
    assert kinds == [
        (OpKind.BARRIER, 0),
        (OpKind.SEND, -1),
        (OpKind.ALL_REDUCE, 1),
        (OpKind.RECV, -1),
        (OpKind.BROADCAST, 2),
    ]
    group.close()


@pytest.mark.concurrency
def test_numbers_are_the_order_in_which_the_channel_sees_operations_of_many_threads() -> None:
    group, channel = null_group()

    def submit() -> None:
        for _ in range(200):
            group.all_reduce(torch.ones(1))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [operation.number for operation in channel.operations] == list(range(800))
    group.close()


def test_keys_of_futures_are_equal_on_all_ranks_and_different_for_all_operations() -> None:
    groups = [null_group(rank)[0] for rank in (0, 3)]
    keys = [[group.barrier().key for _ in range(100)] for group in groups]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 100
    for group in groups:
        group.close()


def test_operations_in_a_callback_get_keys_and_no_numbers() -> None:
    keys = []
    for rank in (0, 2):
        group, channel = null_group(rank)

        def twice(_: Future[None], group: ProcessGroup = group) -> None:
            group.barrier()
            group.all_reduce(torch.ones(1))
            group.send(torch.ones(1), 1)

        child = group.barrier().then(twice)
        channel.futures[0].set_result(None)
        child.wait(10)
        group.barrier()
        assert [operation.number for operation in channel.operations] == [0, -1, -1, -1, 1]
        keys.append([operation.key for operation in channel.operations])
        assert keys[-1][0] == keys[-1][3] == keys[-1][4] == 0
        group.close()
    assert keys[0] == keys[1]
    assert len({key for key in keys[0] if key}) == 2


def test_a_callback_of_a_message_issues_operations_like_everybody_else() -> None:
    group, channel = null_group()
    child = group.send(torch.ones(1), 0).then(lambda _: group.barrier())
    channel.futures[0].set_result(None)
    child.wait(10)
    assert channel.operations[1].number == 0
    assert channel.operations[1].key == 0
    group.close()


def test_an_operation_carries_its_own_timeout_or_that_of_the_group() -> None:
    group, channel = null_group()
    group.barrier()
    group.barrier(timeout=2)
    assert [operation.timeout for operation in channel.operations] == [9.0, 2.0]
    group.close()


def test_a_contiguous_tensor_is_handed_over_itself() -> None:
    group, channel = null_group()
    x = torch.nn.Parameter(torch.ones(3, 2))
    group.all_reduce(x)
    assert channel.operations[0].inputs[0] is x
    assert channel.operations[0].outputs[0] is x
    group.close()


def test_channels_see_only_plain_tensors() -> None:
    group, channel = null_group(rank=0, size=2)
    x = torch.arange(6.0).reshape(2, 3).T
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    group.all_reduce(x)
    group.all_reduce(z)
    group.all_reduce(z.imag)
    group.all_gather([torch.empty(2, 6)[:, ::2], torch.empty(3, 2).T], x)
    group.send(torch.ones(1).expand(5), 1)
    group.recv(torch.empty(4, 4)[:, 0], 1)
    for operation in channel.operations:
        for tensor in (*operation.inputs, *operation.outputs):
            assert tensor.is_contiguous()
            assert not tensor.is_conj()
            assert not tensor.is_neg()
    assert channel.operations[1].inputs[0].tolist() == [1 - 2j, 3 + 1j]
    assert channel.operations[2].inputs[0].tolist() == [-2.0, 1.0]
    group.close()


def test_a_value_is_in_place_before_anybody_sees_the_future_complete() -> None:
    group, channel = null_group()
    x = torch.zeros(2, 3).T
    future = group.all_reduce(x)
    assert not future.done()
    channel.operations[0].outputs[0].fill_(7.0)
    channel.futures[0].set_result(channel.operations[0].outputs[0])
    assert future.done()
    assert future.value() is x
    assert x.eq(7.0).all()
    group.close()


def test_the_state_and_the_exception_of_a_broken_group_are_those_of_its_channel() -> None:
    group, channel = null_group()
    assert group.state == "open"
    channel.broken = PeerLost("rank 3 died", [3])
    assert group.state == "broken"
    for call in (group.barrier, lambda: group.send(torch.ones(1), 0), lambda: group.subgroup([1])):
        with pytest.raises(PeerLost, match=r"on rank \d is broken: rank 3 died") as caught:
            call()
        assert caught.value.ranks == channel.broken.ranks
    assert channel.operations == []
    group.close()
    with pytest.raises(GroupClosed):
        group.barrier()


def test_operations_are_recorded() -> None:
    group, channel = null_group()
    group.all_reduce(torch.ones(5))
    group.send(torch.ones(2, dtype=torch.int8), 3, tag=4)
    channel.futures[0].set_result(None)
    assert group.recorder is not None
    first, second = group.recorder.entries()
    assert (first.kind, first.number, first.dtype, first.count) == ("all_reduce", 0, "float32", 5)
    assert (second.kind, second.peer, second.tag, second.dtype) == ("send", 3, 4, "int8")
    group.close()


def test_the_recorder_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_RECORDER_SIZE", "0")
    group, _ = null_group()
    group.barrier()
    group.send(torch.ones(1), 0)
    assert group.recorder is None
    group.close()
