"""The rank's side of ``make gpu``: training over ``init_process_group("cpu:shoal,cuda:nccl")``.

    shoal run -n 1 benchmarks/gpu_programs.py --device cuda --engine nccl
    shoal run -n 2 benchmarks/gpu_programs.py --device cpu

Every check compares with a reference in the same process, and all checks run even if some fail. Rank 0 prints
one JSON object at the end: ``{"<check>": {"outcome": "passed", "seconds": ..., ...}}``. The outcome is
"skipped", with the reason, if a package is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shoal

STEPS = 20
BATCH = 16  # images per rank

Figures = dict[str, Any]


def small_cnn() -> nn.Module:
    """Return a network with 20,000 parameters for images of 3 x 16 x 16, equal in every process."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(11)
    x = torch.randn(BATCH * size, 3, 16, 16)
    return x, (x.mean((1, 2, 3)) * 200).long().remainder(10)


class NotInstalled(Exception):
    """A check is skipped, because a package is missing."""


def first_installed(*modules: str) -> Any:
    """Import the first of ``modules`` that is installed; raise NotInstalled if none is."""
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return importlib.import_module(module)
    raise NotInstalled(f"{modules[0].partition('.')[0]} is not installed")


class Checks:
    """The checks of one rank; ``folder`` is shared by the ranks."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        x, y = images(self.size)
        self.whole = x.to(device), y.to(device)
        mine = slice(BATCH * self.rank, BATCH * (self.rank + 1))
        self.mine = self.whole[0][mine], self.whole[1][mine]

    def train(
        self,
        model: nn.Module,
        batch: tuple[torch.Tensor, torch.Tensor],
        *,
        optimizer: Any = None,
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    ) -> list[float]:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def reference(self) -> nn.Module:
        """Return the network after the same training in this process alone."""
        model = small_cnn().to(self.device)
        losses = self.train(model, self.whole)
        assert losses[-1] < losses[0], losses
        return model

    # -- the checks ----------------------------------------------------------------------------

    def collectives(self) -> Figures:
        """Collectives of tensors on the device and on the CPU, in one group."""
        expected = float(sum(range(1, self.size + 1)))
        for device in {self.device, torch.device("cpu")}:
            x = torch.full((1000,), self.rank + 1.0, device=device)
            dist.all_reduce(x)
            assert bool((x == expected).all()), (device, x[0])
            parts = [torch.zeros(3, device=device) for _ in range(self.size)]
            dist.all_gather(parts, torch.full((3,), float(self.rank), device=device))
            assert [int(part[0]) for part in parts] == list(range(self.size))
            y = torch.full((2,), float(self.rank), device=device)
            dist.broadcast(y, src=self.size - 1)
            assert y.tolist() == [self.size - 1.0] * 2
            work = dist.all_reduce(y, async_op=True)
            assert work is not None
            work.wait()
            assert y.tolist() == [(self.size - 1.0) * self.size] * 2
            dist.barrier()
        return {}

    def objects(self) -> Figures:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, {"rank": self.rank, "x": torch.full((2,), self.rank)})
        assert [each["rank"] for each in every] == list(range(self.size))
        told = ["hello", self.rank] if self.rank == 0 else [None, None]
        dist.broadcast_object_list(told, src=0)
        assert told == ["hello", 0]
        return {}

    def ddp(self) -> Figures:
        """torch's DDP of a small CNN, compared with the same training in one process."""
        ids = [self.device.index] if self.device.type == "cuda" else None
        model = DistributedDataParallel(small_cnn().to(self.device), device_ids=ids)
        started = time.perf_counter()
        self.train(model, self.mine)
        seconds = time.perf_counter() - started
        distance = _distance(model.module, self.reference())
        assert distance < 1e-3, distance
        return {"distance": distance, "ms_per_step": round(1000 * seconds / STEPS, 3)}

    def accelerate(self) -> Figures:
        """Training with Accelerate in the existing group, compared with the same in one process."""
        library = first_installed("accelerate")
        accelerator = library.Accelerator(cpu=self.device.type == "cpu")
        assert accelerator.num_processes == self.size
        assert accelerator.device.type == self.device.type
        model = small_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        self.train(model, self.mine, optimizer=optimizer, backward=accelerator.backward)
        distance = _distance(accelerator.unwrap_model(model), self.reference())
        assert distance < 1e-3, distance
        mean = accelerator.reduce(torch.full((3,), float(self.rank), device=self.device), "mean")
        assert mean.tolist() == [(self.size - 1) / 2] * 3
        objects = library.utils.gather_object([{"rank": self.rank}])
        assert objects == [{"rank": rank} for rank in range(self.size)]
        accelerator.wait_for_everyone()
        return {"distance": distance, "version": library.__version__}

    def lightning(self) -> Figures:
        """Training with Lightning Fabric in the existing group, compared with the same in one process."""
        library = first_installed("lightning_fabric", "lightning.fabric")
        strategies = importlib.import_module(f"{library.__name__}.strategies")
        fabric = library.Fabric(
            accelerator=self.device.type, devices=self.size, strategy=strategies.DDPStrategy()
        )
        fabric.launch()
        assert (fabric.global_rank, fabric.world_size) == (self.rank, self.size)
        net = small_cnn()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = fabric.setup(net, optimizer)
        self.train(model, self.mine, optimizer=optimizer, backward=fabric.backward)
        distance = _distance(net, self.reference())
        assert distance < 1e-3, distance
        mean = fabric.all_reduce(torch.full((3,), float(self.rank), device=self.device), reduce_op="mean")
        assert mean.tolist() == [(self.size - 1) / 2] * 3
        assert fabric.broadcast({"rank": self.rank}, src=self.size - 1) == {"rank": self.size - 1}
        fabric.barrier()
        return {"distance": distance, "version": library.__version__}

    def checkpoint(self) -> Figures:
        """A distributed checkpoint of a trained network, loaded into a new network and compared."""
        model = small_cnn().to(self.device)
        self.train(model, self.whole)
        for each in model.state_dict().values():
            dist.broadcast(each, src=0)  # GPU sums may differ between processes
        folder = self.folder / "checkpoint"
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        fresh = small_cnn().to(self.device)
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        fresh.load_state_dict(state["model"])
        assert _distance(fresh, model) == 0
        return {}

    def fsdp2(self) -> Figures:
        """FSDP2, compared with the same training in one process."""
        from torch.distributed.device_mesh import init_device_mesh

        model = small_cnn().to(self.device)
        mesh = init_device_mesh(self.device.type, (self.size,))
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        started = time.perf_counter()
        self.train(model, self.mine)
        seconds = time.perf_counter() - started
        whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
        expected = self.reference().state_dict()
        distance = max(float((whole[name] - expected[name]).abs().max()) for name in expected)
        assert distance < 1e-3, distance
        return {"distance": distance, "ms_per_step": round(1000 * seconds / STEPS, 3)}

    def refusal(self) -> Figures:
        """A GPU tensor in a group of shoal alone raises a clear error, and the group stays usable."""
        if self.device.type != "cuda":
            return {}
        group = dist.new_group(backend="shoal")
        try:
            dist.all_reduce(torch.ones(1, device=self.device), group=group)
        except (shoal.UsageError, shoal.UnsupportedOperation) as error:
            said = str(error)
            assert "cuda" in said, said
        else:
            raise AssertionError("a tensor of a GPU was reduced on the CPU")
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == self.size
        return {"message": said}

    def latency(self) -> Figures:
        """The milliseconds of an all_reduce of 25 MB on the device and on the CPU."""
        figures = {}
        for device in sorted({self.device.type, "cpu"}):
            x = torch.ones(25 * 2**18, device=device)
            times = []
            for _ in range(12):
                dist.barrier()
                started = time.perf_counter()
                dist.all_reduce(x)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
                x.fill_(1)
            figures[f"{device}_ms"] = round(1000 * statistics.median(times[2:]), 3)
        return figures


CHECKS = (
    "collectives", "objects", "ddp", "checkpoint", "fsdp2", "accelerate", "lightning", "refusal", "latency",
)  # fmt: skip


def _distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def _checked(check: Callable[[], Figures]) -> Figures:
    started = time.perf_counter()
    try:
        figures, outcome = check(), "passed"
    except NotInstalled as missing:
        figures, outcome = {"reason": str(missing)}, "skipped"
    except Exception:
        figures, outcome = {"error": traceback.format_exc()[-3000:]}, "failed"
    return {"outcome": outcome, "seconds": round(time.perf_counter() - started, 3), **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--engine", default="nccl", help="torch's backend for the device (default: nccl)")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--without", nargs="+", choices=CHECKS, default=(), help="checks to skip")
    given = parser.parse_args()
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Results of different summations are compared, so TF32 rounding is disabled.
        torch.backends.cudnn.allow_tf32 = False
    backend = "cpu:shoal" if given.device == "cpu" else f"cpu:shoal,cuda:{given.engine}"
    dist.init_process_group(backend)
    shared = [tempfile.mkdtemp(prefix="shoal-gpu-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(str(shared[0]))
    checks = Checks(device, folder)
    figures = {name: _checked(getattr(checks, name)) for name in given.checks if name not in given.without}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, figures)
    for other in every:  # a check passes if it passed on every rank
        for name, result in other.items():
            if result["outcome"] == "failed":
                figures[name] = result
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()
    return int(any(result["outcome"] == "failed" for result in figures.values()))


if __name__ == "__main__":
    warnings.simplefilter("default")
    sys.exit(main())
