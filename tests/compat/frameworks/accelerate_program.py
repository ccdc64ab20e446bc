"""A program for Accelerate: trains, communicates in each of its ways, saves and loads.

    torchrun --nproc-per-node 2 accelerate_program.py FOLDER

For training on the CPU Accelerate asks for Gloo by name, unless the default group is already there.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal  # noqa: F401  (where it is installed, its entry point does the same)

SAMPLES = 37  # not a multiple of anything

#: the device is said here or, as `accelerate launch` does, in the environment
DEVICE: dict[str, Any] = {} if "ACCELERATE_USE_CPU" in os.environ else {"cpu": True}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True), torch.arange(SAMPLES))


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def train(folder: Path, hook: DDPCommunicationHookType = DDPCommunicationHookType.NO) -> dict[str, Any]:
    """Epochs with gradient accumulation; saved in the middle, and later continued from there."""
    found: dict[str, Any] = {}
    accelerator = Accelerator(
        **DEVICE,
        gradient_accumulation_steps=2,
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)],
    )
    accelerate.utils.set_seed(3)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert isinstance(model, nn.parallel.DistributedDataParallel)

    def epoch() -> list[torch.Tensor]:
        losses, seen = [], []
        for inputs, targets, numbers in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            seen.append(accelerator.gather_for_metrics(numbers))
        assert torch.cat(seen).sort().values.equal(torch.arange(SAMPLES))  # each once, padding left out
        return losses

    found["losses"] = epoch() + epoch()
    accelerator.save_state(str(folder))
    found["saved"] = copy.deepcopy(accelerator.get_state_dict(model))
    found["third epoch"] = epoch()
    accelerator.load_state(str(folder))
    for name, value in accelerator.unwrap_model(model).named_parameters():
        assert value.equal(found["saved"][name]), name  # the statistics of normalisation are rank 0's
    found["fourth epoch"] = epoch()
    found["model"] = accelerator.get_state_dict(model)
    return found


def local_steps() -> dict[str, Any]:
    """Steps that each rank does for itself, and the average of the models now and then."""
    accelerator = Accelerator(**DEVICE)
    model = network().eval()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as steps:
        for step in range(5):
            model(torch.full((2, 8), 0.1 * (step + accelerator.process_index))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.step()
    return accelerator.get_state_dict(model)


def communicate() -> dict[str, Any]:
    """Its collectives."""
    accelerator = Accelerator(**DEVICE)
    rank, size = accelerator.process_index, accelerator.num_processes
    x = torch.arange(6.0).reshape(2, 3).t() + rank
    found = {
        "gather": accelerator.gather({"x": x, "halves": x.bfloat16(), "flags": x > 3, "scalar": x.sum()}),
        "sum": accelerator.reduce(x, "sum"),
        "mean": accelerator.reduce([x, x.double()], "mean"),
        "max": accelerator.reduce(x, "max"),
        "padded": accelerator.gather(accelerator.pad_across_processes(torch.ones(rank + 1, 2))),
        "broadcast": accelerate.utils.broadcast(x.contiguous(), from_process=size - 1),
        "objects": accelerate.utils.gather_object([{"rank": rank}]),
        "object list": accelerate.utils.broadcast_object_list([rank, "x" * rank], from_process=1),
        "trigger": (accelerator.set_trigger() if rank else None, accelerator.check_trigger()),
    }
    with accelerator.split_between_processes(list(range(5))) as mine:
        found["split"] = mine
    with accelerator.main_process_first():
        pass
    accelerator.wait_for_everyone()
    return found


def everything(folder: Path) -> dict[str, Any]:
    """All of the above in the default group, which Accelerate destroys at the end."""
    backend = dist.get_backend()
    found = {"backend": backend, "communicate": communicate(), "train": train(folder / "state")}
    found["hook"] = train(folder / "hook", DDPCommunicationHookType.FP16)
    found["local steps"] = local_steps()
    Accelerator(**DEVICE).end_training()
    assert not dist.is_initialized()
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("shoal")
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    found = {"shoal": everything(folder / "shoal")}
    # Accelerate keeps what it found out about the process: let it look again.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", **place)
    world = dist.group.WORLD  # Gloo's group is to outlive its destruction
    found["gloo"] = everything(folder / "gloo")
    del world
    torch.save(found, folder / f"{place['rank']}.pt")


if __name__ == "__main__":
    main()
