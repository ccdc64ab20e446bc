"""torch's pipeline schedules, which send activations and gradients in batches of messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support import releases

from .compare import World, same_as_gloo

WIDTH = 8


def layers(number: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)]


def data(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def stages(world: World, indices: list[int], number: int, group: Any = None) -> list[PipelineStage]:
    every = layers(number)
    device = torch.device("cpu")
    return [
        PipelineStage(every[index], index, number, device, group=group or world.group) for index in indices
    ]


def steps(schedule: Any, parts: list[PipelineStage]) -> Any:
    """Two steps of training; what the rank with the last stage sees, and its stages' parameters."""
    parameters = [parameter for part in parts for parameter in part.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    results: list[Any] = []
    for step in range(2):
        inputs, targets = data(step)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        results.append(
            schedule.step(
                *([inputs] if any(part.is_first for part in parts) else []),
                target=targets if any(part.is_last for part in parts) else None,
                losses=losses,
            )
        )
        optimizer.step()
        results += losses
    return results, parameters


def one_stage(world: World, schedule: Any) -> Any:
    parts = stages(world, [world.rank], world.size)
    return steps(schedule(parts[0], n_microbatches=world.size * 2, loss_fn=loss), parts)


def two_stages(world: World, schedule: Any) -> Any:
    """Rank r has the stages r and r + size."""
    parts = stages(world, [world.rank, world.rank + world.size], 2 * world.size)
    return steps(schedule(parts, n_microbatches=world.size * 2, loss_fn=loss), parts)


def there_and_back(world: World, schedule: Any) -> Any:
    """Rank r has the stages r and, counted from the end, r."""
    parts = stages(world, [world.rank, 2 * world.size - 1 - world.rank], 2 * world.size)
    return steps(schedule(parts, n_microbatches=world.size * 2, loss_fn=loss), parts)


def gpipe(world: World) -> Any:
    return one_stage(world, ScheduleGPipe)


def one_forward_one_backward(world: World) -> Any:
    return one_stage(world, Schedule1F1B)


def breadth_first(world: World) -> Any:
    return two_stages(world, ScheduleLoopedBFS)


def interleaved(world: World) -> Any:
    return two_stages(world, ScheduleInterleaved1F1B)


def interleaved_without_bubbles(world: World) -> Any:
    return two_stages(world, ScheduleInterleavedZeroBubble)


def in_a_v_without_bubbles(world: World) -> Any:
    return there_and_back(world, ScheduleZBVZeroBubble)


def in_two_directions(world: World) -> Any:
    return there_and_back(world, ScheduleDualPipeV)


def as_without_a_pipeline(world: World) -> Any:
    """The last rank's outputs are those of the whole model."""
    whole = nn.Sequential(*layers(world.size))
    torch.manual_seed(0)
    parts = stages(world, [world.rank], world.size)
    inputs, targets = data(0)
    schedule = ScheduleGPipe(parts[0], n_microbatches=4, loss_fn=loss)
    output = schedule.step(*([inputs] if parts[0].is_first else []), target=targets)
    if parts[0].is_last:
        torch.testing.assert_close(output, whole(inputs))
    return list(parts[0].submod.parameters())


class Split(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def a_model_split_by_torch(world: World) -> Any:
    inputs, targets = data(0)
    points = {f"layers.{number}": SplitPoint.BEGINNING for number in range(1, world.size)}
    pipe = pipeline(Split(world.size), mb_args=(inputs[:4],), split_spec=points)
    stage = pipe.build_stage(world.rank, torch.device("cpu"), world.group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)
    output = schedule.step(*([inputs] if stage.is_first else []), target=targets)
    return output, [parameter.grad for parameter in stage.submod.parameters()]


def two_pipelines(world: World) -> Any:
    """Data parallel pipelines: with four ranks two of two stages, whose stages DDP keeps alike."""
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("data", "pipeline"))
    rank = mesh["pipeline"].get_local_rank()
    net = layers(2)[rank]
    copies = DDP(net, process_group=mesh["data"].get_group())
    part = PipelineStage(copies, rank, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    return steps(Schedule1F1B(part, n_microbatches=4, loss_fn=loss), [part])


CASES = [
    gpipe, one_forward_one_backward, breadth_first, interleaved, interleaved_without_bubbles,
    as_without_a_pipeline, a_model_split_by_torch, two_pipelines,
]  # fmt: skip
if releases.pipelines_keep_messages_local():
    CASES += [in_a_v_without_bubbles, in_two_directions]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_pipeline_trains_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
