"""torch.compile over collectives, DDP, FSDP and DTensor.

The backend is "aot_eager", which does what the compiler does but for the C++ that takes ten seconds to build;
one test goes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from .compare import World, on_shoal, same_as_gloo
from .models import mlp, train


def compiled(function: Callable[..., Any], *, backend: Any = "aot_eager", fullgraph: bool = True) -> Any:
    """From nothing: what was compiled for the other backend's group is no proof."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


def numbers(world: World) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randint(-8, 8, (2 * world.size, 3), generator=generator).float()


def functional_collectives(world: World) -> Any:
    group = world.group

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = funcol.all_reduce(x * 2, "sum", group) + 1
        return [
            funcol.all_gather_tensor(y, 0, group) * 2,
            funcol.reduce_scatter_tensor(y, "sum", 0, group).relu(),
            funcol.all_to_all_single(y, None, None, group) - 1,
            funcol.broadcast(x + 1, 1, group) / 2,
        ]

    return compiled(function)(numbers(world))


def in_place_collectives(world: World) -> Any:
    """The calls of torch.distributed themselves, which the compiler replaces by functional ones."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        dist.all_reduce(y)
        gathered = torch.empty(y.shape[0] * world.size, 3)
        dist.all_gather_into_tensor(gathered, y)
        part = torch.empty(2, 3)
        dist.reduce_scatter_tensor(part, y)
        swapped = torch.empty_like(y)
        dist.all_to_all_single(swapped, y)
        return y, gathered + 1, part, swapped

    return compiled(function)(numbers(world))


def gradients(world: World) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_gather_tensor_autograd(x.sin(), 0, world.group)
        z = funcol.reduce_scatter_tensor_autograd(y * y, "sum", 0, world.group)
        return (z * x).sum()

    x = numbers(world).requires_grad_()
    value = compiled(function)(x)
    value.backward()
    return value, x.grad


def ddp(world: World) -> Any:
    """Buckets of a layer each split the graph, so that gradients are reduced while others are computed."""
    net = nn.Sequential(
        nn.Linear(8, 512), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 4)
    )
    model = DDP(net, process_group=world.group, bucket_cap_mb=1)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph

    parameters = train(compiled(model, backend=backend, fullgraph=False), world)
    return len(graphs), [parameter.sum() for parameter in parameters], parameters[-1]


def a_compiled_model_in_ddp(world: World) -> Any:
    model = DDP(compiled(mlp()), process_group=world.group)
    return train(model, world)


def fsdp(world: World) -> Any:
    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (world.size,)))
    return train(compiled(model, fullgraph=False), world)


def dtensors(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))

    def function(x: DTensor, y: DTensor) -> DTensor:
        return (x @ y).redistribute(mesh, [Shard(1)]).relu()

    x = distribute_tensor(torch.arange(24.0).reshape(4, 6) - 9, mesh, [Shard(1)])
    y = distribute_tensor(torch.arange(24.0).reshape(6, 4) - 5, mesh, [Shard(0)])
    return compiled(function)(x, y)


def tensor_parallel(world: World) -> Any:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (world.size,))
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.arange(16.0).reshape(2, 8) / 16
    output = compiled(net)(x)
    output.square().sum().backward()
    return output, [parameter.grad for parameter in net.parameters()]


#: on four ranks too, but for DTensor in long tests: compiling takes each rank the same time again
ON_FOUR = [functional_collectives, in_place_collectives, ddp, fsdp]
CASES = [*ON_FOUR, dtensors, gradients, a_compiled_model_in_ddp, tensor_parallel]


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 2) for case in CASES),
        (dtensors, 4),
        *(pytest.param(case, 4, marks=pytest.mark.stress) for case in ON_FOUR),
    ],
)
def test_what_is_compiled_does_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)


def the_whole_compiler(world: World) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2 + 1, "sum", world.group) - 1

    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        result = torch.compile(function, fullgraph=True)(numbers(world))
    assert torch.equal(result, function(numbers(world)))


def test_the_code_that_the_compiler_writes(ranks):
    # It runs a C++ compiler, one rank after the other.
    ranks(2).run(on_shoal, the_whole_compiler, limit=300)
