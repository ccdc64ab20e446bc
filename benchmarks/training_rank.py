"""One rank of ``training.py``: trains every contender in turns and reports when each step began and ended.

    shoal run -n 2 benchmarks/training_rank.py --task mlp --contenders alone shoal gloo --result out.json

All contenders have the same model with the same weights, and on each rank the same batch. The order within a
round is random, and the same on all ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training_models import TASKS, Task
from training_timeline import record

import shoal

TURN = 0.1  # seconds of timed steps in a turn, which has at least one step
ROUNDS = 5, 500  # minimum and maximum
SINGLE = "alone", "hooks", "shoal-single"  # contenders that average over nothing
TOLERANCE = 1e-4  # maximum error of averaged gradients, relative to the largest gradient

#: begin and end of a step (``perf_counter_ns``, one clock for all processes of a machine), and the CPU time
#: of all threads of the rank meanwhile, in ns
Step = tuple[int, int, int]


@dataclass
class Contender:
    """One way to train the model; ``keep`` zeroes gradients in place instead of dropping them."""

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]
    keep: bool
    group: shoal.ProcessGroup | None = None  # of shoal's DDP, used by nothing else
    waited: float = 0.0  # seconds in which this rank waited for others in timed steps

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keep)
        self.task.loss(self.model(self.batch[0]), self.batch[1]).backward()

    def turn(self, group: shoal.ProcessGroup, count: int) -> list[Step]:
        """Run an untimed step, then ``count`` steps, each after a barrier; optimizer steps are untimed."""
        self.step()
        self.optimizer.step()
        steps = []
        before = self._waited()
        for _ in range(count):
            group.barrier().wait()
            cpu = time.process_time_ns()
            began = time.perf_counter_ns()
            self.step()
            ended = time.perf_counter_ns()
            steps.append((began, ended, time.process_time_ns() - cpu))
            self.optimizer.step()
        self.waited += self._waited() - before
        return steps

    def _waited(self) -> float:
        return 0.0 if self.group is None else self.group.stats().waited_s


def contender(name: str, task: Task, group: shoal.ProcessGroup, *, keep: bool) -> Contender:
    """Create a contender of ``training.py``; a suffix such as @8 is the bucket size in MiB."""
    torch.manual_seed(0)
    model = task.build()
    torch.manual_seed(1 + group.rank)
    batch = task.batch()
    kind, _, cap = name.partition("@")
    options: dict[str, Any] = {"bucket_cap_mb": float(cap)} if cap else {}
    own: shoal.ProcessGroup | None = None
    if kind in ("shoal", "shoal-single"):
        own = group.split(group.rank if kind == "shoal-single" else 0)
        model = shoal.DistributedDataParallel(model, group=own, **options)
    elif kind == "hooks":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
    elif kind.startswith("fsdp"):
        mesh = DeviceMesh.from_group(_torch_group(kind), "cpu")
        for layer in model if isinstance(model, nn.Sequential) else ():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind != "alone":
        views = kind != "gloo-copying"
        model = TorchDDP(model, process_group=_torch_group(kind), gradient_as_bucket_view=views, **options)
    # A small learning rate, so that every step computes with similar numbers.
    return Contender(task, model, torch.optim.SGD(model.parameters(), lr=1e-5), batch, keep, own)


def _torch_group(kind: str) -> dist.ProcessGroup:
    """Return the default group of Gloo, or a group of the same ranks on the backend "shoal"."""
    default = dist.group.WORLD
    assert default is not None
    if not kind.endswith("shoal"):
        return default
    made: dist.ProcessGroup = dist.new_group(backend="shoal")
    return made


def check(contenders: dict[str, Contender], group: shoal.ProcessGroup) -> None:
    """Check that all contenders' gradients equal the mean of those computed alone, up to rounding."""
    means = []
    for parameter in contenders["alone"].model.parameters():
        assert parameter.grad is not None
        means.append(parameter.grad.clone())
        group.all_reduce(means[-1], op="avg").wait()
    for name, one in contenders.items():
        for number, (parameter, mean) in enumerate(zip(one.model.parameters(), means, strict=True)):
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            error = (grad - mean).abs().max() / mean.abs().max()
            if name not in SINGLE and not error <= TOLERANCE:  # NaN counts as an error
                raise RuntimeError(
                    f"{name}: the gradient of parameter {number} is off by {error:.1e} on rank {group.rank}"
                )


def race(contenders: dict[str, Contender], group: shoal.ProcessGroup, seconds: float) -> dict[str, Any]:
    """Let the contenders take turns for about this many ``seconds``.

    Returns:
        ``steps``: by contender, the turns of this rank; a turn is a list of :data:`Step`.
        ``parameters``: number of parameters (tensors) of the model.
        ``waited``: by contender, seconds per timed step in which this rank waited for others.
    """
    for one in contenders.values():
        one.step()
        one.step()  # DDP rebuilds its buckets after the first step
    check(contenders, group)
    gc.freeze()
    gc.collect()
    began = time.perf_counter()
    slowest = max(_seconds(one.turn(group, 1)) for one in contenders.values())
    spent = time.perf_counter() - began  # of two steps of each contender and its optimizer
    count = max(1, round(TURN / slowest))
    rounds = max(ROUNDS[0], min(ROUNDS[1], round(seconds / (spent / 2 * (count + 1)))))
    count, rounds = group.broadcast_object((count, rounds), root=0).wait()
    steps: dict[str, list[list[Step]]] = {name: [] for name in contenders}
    for one in contenders.values():
        one.waited = 0.0
    for number in range(rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            gc.collect()
            steps[name].append(contenders[name].turn(group, count))
    waited = {name: one.waited / (rounds * count) for name, one in contenders.items()}
    parameters = sum(1 for _ in contenders["alone"].model.parameters())
    return {"steps": steps, "parameters": parameters, "waited": waited}


def _seconds(steps: Sequence[Step]) -> float:
    return sum(ended - began for began, ended, _ in steps) / len(steps) * 1e-9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--contenders", nargs="+", default=["alone", "shoal"])
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[arguments.task]
    with shoal.init() as group:
        if arguments.timeline:
            (name,) = arguments.contenders
            found = record(lambda: contender(name, task, group, keep=arguments.keep), group)
        else:
            place = f"file://{arguments.result.resolve()}.gloo"
            dist.init_process_group("gloo", init_method=place, rank=group.rank, world_size=group.size)
            try:
                contenders = {
                    name: contender(name, task, group, keep=arguments.keep) for name in arguments.contenders
                }
                found = race(contenders, group, arguments.seconds)
            finally:
                dist.destroy_process_group()
        everything = group.gather_object(found, root=0).wait()
    if everything is not None:
        arguments.result.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
