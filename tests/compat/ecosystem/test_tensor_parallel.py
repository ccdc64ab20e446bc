"""Tensor parallel plans, their loss, FSDP over them, and context parallel attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .compare import World, same_as_gloo

WORDS = 12


class Block(nn.Module):
    """A norm, attention of four heads, and two layers; batch x sequence x 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.out = nn.Linear(8, 8, bias=False)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [
            layer(y).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        attention = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.narrow(self.wide(x).relu())
        return result


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.block = Block()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.block(self.embedding(words))))
        return logits


PLAN: dict[str, ParallelStyle] = {
    "block.query": ColwiseParallel(),
    "block.key": ColwiseParallel(),
    "block.value": ColwiseParallel(),
    "block.out": RowwiseParallel(),
    "block.wide": ColwiseParallel(),
    "block.narrow": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}

SEQUENCE_PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.norm": SequenceParallel(),
    "block.query": ColwiseParallel(input_layouts=Shard(1)),
    "block.key": ColwiseParallel(input_layouts=Shard(1)),
    "block.value": ColwiseParallel(input_layouts=Shard(1)),
    "block.out": RowwiseParallel(output_layouts=Shard(1)),
    "block.wide": ColwiseParallel(input_layouts=Shard(1)),
    "block.narrow": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def line(world: World) -> DeviceMesh:
    return init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))


def words(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (3, 9), generator=torch.Generator().manual_seed(10 * rank + step))


def train(model: nn.Module, rank: int = 0, parallel_loss: bool = False) -> Any:
    """Three steps of next-word prediction on two sentences of eight words."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        text = words(step, rank)
        optimizer.zero_grad()
        logits = model(text[:, :-1]).flatten(0, 1)
        if parallel_loss:
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return losses, list(model.parameters())


def columns_and_rows(world: World) -> Any:
    return train(parallelize_module(Language(), line(world), dict(PLAN)))


def as_without_a_plan(world: World) -> Any:
    """The plan's result is one model's, up to rounding."""
    whole = Language()
    torch.manual_seed(0)
    parts = parallelize_module(Language(), line(world), dict(PLAN))
    losses, _ = train(whole)
    losses_of_parts, _ = train(parts)
    torch.testing.assert_close(torch.stack(losses), torch.stack(losses_of_parts))
    return losses_of_parts


def sequence_and_loss(world: World) -> Any:
    return train(parallelize_module(Language(), line(world), dict(SEQUENCE_PLAN)), parallel_loss=True)


def prepared_inputs_and_outputs(world: World) -> Any:
    mesh = line(world)
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4))
    plan: dict[str, ParallelStyle] = {
        "0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "0.0": ColwiseParallel(use_local_output=False),
        "1": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    net = parallelize_module(net, mesh, plan)
    net = parallelize_module(
        net, mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    )
    both = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        use_local_input=False,
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    net = nn.Sequential(net, parallelize_module(nn.Sequential(nn.Tanh()), mesh, both))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(world.rank))
    y = net(x)
    y.square().sum().backward()
    return y, [parameter.grad for parameter in net.parameters()]


def shards_of_parts(world: World) -> Any:
    """FSDP over tensor parallel: a mesh of two by half of the ranks."""
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(Language(), mesh["tensor"], dict(PLAN))
    fully_shard(model.block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return train(model, mesh["data"].get_local_rank())


CASES = [
    columns_and_rows, as_without_a_plan, sequence_and_loss, prepared_inputs_and_outputs,
    shards_of_parts,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_parallel_model_trains_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
