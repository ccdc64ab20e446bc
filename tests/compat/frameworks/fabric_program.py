"""A program for Lightning Fabric: trains by DDP and by FSDP2, communicates, saves and loads.

    python fabric_program.py FOLDER          # Fabric starts the second process itself

or with torchrun or ``shoal run``, which have started it already.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric, seed_everything
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import shoal  # noqa: F401  (where it is installed, its entry point does the same)

# Lightning says so where Slurm is installed, as for the tests of srun.
warnings.filterwarnings("ignore", "The `srun` command is available on your system")

#: two processes on the CPU; a strategy says how they train
MACHINE: dict[str, Any] = {"accelerator": "cpu", "devices": 2}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(37, 8, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))


def train(fabric: Fabric, checkpoint: Path) -> dict[str, Any]:
    """Epochs with gradient accumulation; saved in the middle, and later continued from there."""
    found: dict[str, Any] = {}
    seed_everything(3, verbose=False)
    model = fabric.setup(network())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=4, shuffle=True))

    def epoch() -> list[torch.Tensor]:
        losses = []
        for step, (inputs, targets) in enumerate(loader):
            accumulating = step % 2 == 0 and step + 1 < len(loader)
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = (model(inputs) - targets).square().mean()
                fabric.backward(loss)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean"))
        return losses

    def parameters() -> dict[str, torch.Tensor]:
        """Copies, put together where they were sharded."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in model.state_dict().items()
        }

    found["losses"] = epoch() + epoch()
    state = {"model": model, "optimizer": optimizer, "epochs": 2}
    fabric.save(checkpoint, state)
    found["saved"] = parameters()
    found["third epoch"] = epoch()
    state["epochs"] = 3
    fabric.load(checkpoint, state)
    assert state["epochs"] == 2
    for name, value in parameters().items():
        assert value.equal(found["saved"][name]), name
    found["fourth epoch"] = epoch()
    found["model"] = parameters()
    return found


def communicate(fabric: Fabric) -> dict[str, Any]:
    """Its collectives."""
    rank, size = fabric.global_rank, fabric.world_size
    x = torch.arange(6.0).reshape(2, 3) + rank
    found = {
        "mean": fabric.all_reduce({"x": x.clone(), "halves": x.bfloat16()}),
        "sum": fabric.all_reduce(x.clone(), reduce_op="sum"),
        "mean of whole numbers": fabric.all_reduce(torch.tensor([rank, 3 + rank]), reduce_op="mean"),
        "gather": fabric.all_gather({"x": x, "scalar": x.sum(), "number": rank}),
        "broadcast": fabric.broadcast({"rank": rank, "x": x}, src=size - 1),
    }
    y = x.clone().requires_grad_()
    (fabric.all_gather(y, sync_grads=True) * (1 + rank)).sum().backward()
    found["gradient"] = y.grad
    with fabric.rank_zero_first():
        pass
    fabric.barrier()
    return found


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """FSDP2, a layer at a time."""
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def everything(folder: Path, backend: str) -> dict[str, Any]:
    """All of the above in one default group, which is destroyed at the end."""
    fabric = Fabric(**MACHINE, strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    world = dist.group.WORLD  # Gloo's group is to outlive its destruction
    found = {"backend": dist.get_backend(), "communicate": communicate(fabric)}
    found["train"] = train(fabric, folder / "ddp.ckpt")
    os.environ["LOCAL_RANK"] = str(fabric.local_rank)  # the processes are there now
    strategy = ModelParallelStrategy(
        shard, data_parallel_size=2, tensor_parallel_size=1, process_group_backend=backend
    )
    fabric = Fabric(**MACHINE, strategy=strategy)
    fabric.launch()
    found["sharded"] = train(fabric, folder / "fsdp")
    dist.destroy_process_group()
    del world
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    # Fabric's all_gather calls what torch 2.13 calls deprecated.
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated")
    found = {"shoal": everything(folder / "shoal", "shoal")}
    rank, size = int(os.environ["LOCAL_RANK"]), 2
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=size)
    found["gloo"] = everything(folder / "gloo", "gloo")
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
