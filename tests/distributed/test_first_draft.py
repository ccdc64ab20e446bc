"""The spellings of torch.distributed's first draft: backend="tcp", get_num_processes, recv(0), a result."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import cast

import pytest
import torch

import shoal
import shoal.distributed
import shoal.distributed as dist
from shoal import ProcessGroup

from .pool import Pool, begin


def _transport(group: object) -> object:
    """How a group moves bytes; None: the default group."""
    found = dist.group.WORLD if group is None else group
    return cast(ProcessGroup, found)._links.options.get("transport")


def _as_drafted(meeting: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        backend="tcp", init_method=f"file://{meeting}/draft", rank=rank, world_size=size, timeout=20
    )
    my_rank = shoal.distributed.get_rank()
    num_processes = shoal.distributed.get_num_processes()
    assert (my_rank, num_processes) == (rank, size)
    assert dist.get_backend() == dist.Backend.TCP == "tcp"
    assert _transport(None) == "tcp"
    assert [_transport(dist.new_group(backend=name)) for name in (None, "tcp", "gloo")] == [
        "tcp",
        "tcp",
        "auto",
    ]

    tensor = torch.arange(6.0).view(2, 3)
    if my_rank == 0:
        for other in range(1, num_processes):
            shoal.distributed.send(tensor, other)
    else:
        tensor = shoal.distributed.recv(0)
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    result = shoal.distributed.all_reduce(tensor)
    assert torch.equal(result, num_processes * torch.arange(6.0).view(2, 3))
    assert torch.equal(result, tensor)
    assert result.data_ptr() == tensor.data_ptr()

    begin(rank, size, f"{meeting}/after")


def test_tcp_contradicts_shared_memory() -> None:
    with pytest.raises(
        shoal.UsageError, match="backend='tcp' is the native engine over TCP, but pg_options contain"
    ):
        dist.init_process_group(backend="tcp", pg_options={"transport": "shm"})


def test_the_lines_of_the_draft_run(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(_as_drafted, str(tmp_path))


def _receives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for other in range(1, size):
            dist.send(torch.tensor(other, dtype=torch.int16), other, tag=3)
    else:
        x = dist.recv(0, tag=3)
        assert (x.dtype, x.shape, x.item()) == (torch.int16, (), rank)
    pair = dist.new_group([3, 1], sort_ranks=False)
    if rank == 3:
        dist.send(torch.ones(2), 1, pair)
    if rank == 1:  # the sender is a global rank, as everywhere
        assert dist.recv(3, group=pair).tolist() == [1.0, 1.0]
    if rank in (1, 3):
        with pytest.raises(shoal.UsageError, match=r"src=2 is not among .* \[3, 1\]"):
            dist.recv(2, group=pair)
        with pytest.raises(
            shoal.UsageError, match="the first argument, 0, is an int and therefore the sender's rank"
        ):
            dist.recv(0, 1)
    else:
        with pytest.warns(UserWarning, match="recv on global rank"):
            assert dist.recv(3, group=pair) is None
    dist.barrier()


def test_a_receive_without_a_tensor_gives_the_one_that_came(ranks: Pool) -> None:
    ranks.run(_receives)


def _results() -> None:
    size = dist.get_world_size()
    x = torch.ones(3)
    result = dist.all_reduce(x)
    # a program that looks for a work finds one
    if result is not None:
        assert result.wait() is True
    if result:
        result.wait(20)
        result.synchronize()
    assert result.is_completed()
    assert result.is_success()
    assert result.exception() is None
    assert [y.tolist() for y in result.result()] == [y.tolist() for y in result.get_future().wait()]
    # and one that looks for a tensor a tensor
    assert result.tolist() == x.tolist() == [size] * 3
    for made in (result + 1, result[0], result.sum(), result.clone(), copy.deepcopy(result)):
        assert type(made) is torch.Tensor
    assert repr(result) == repr(x)
    assert type(pickle.loads(pickle.dumps(result))) is torch.Tensor
    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), x)
    assert dist.all_reduce(result).tolist() == [size * size] * 3  # of a result
    assert x.tolist() == [size * size] * 3
    # a flag is the flag
    assert not dist.all_reduce(torch.zeros(1))
    assert dist.all_reduce(torch.ones(1))
    # gradients flow through the tensor as if nothing had happened, with a warning
    leaf = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="gradients do not flow through this operation"):
        result = dist.all_reduce((2 * leaf).sum())
    result.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0]
    strided = torch.ones(3, 2).t()
    assert dist.all_reduce(strided).tolist() == [[size] * 3] * 2


def test_the_result_of_all_reduce_is_its_tensor_and_a_work(ranks: Pool) -> None:
    ranks.run(_results)
