"""Measure the backend "nccl" on a GPU; part of ``make gpu``.

    shoal run -n 1 benchmarks/gpu_nccl.py
    shoal run -n 2 benchmarks/gpu_nccl.py --device pretend

``--device pretend`` runs the program on the simulated device of the tests, with a double of NCCL; its figures
mean nothing.  Rank 0 prints one JSON object:

``submit_us``: host time of an all-reduce of 8 bytes until the call returns, and ``torch_submit_us`` that of
    torch's NCCL group.
``order_us``: host time of ``wait(blocking=False)`` on its result.
``replay_us``: time of an all-reduce of 8 bytes in a graph of 20 of them, until the device has replayed it.
``step_ms``, ``step_alone_ms``, ``reduce_ms``: a training step of an MLP with data-parallel training, the same
    without communication, and the all-reduces of its gradients alone.
``overlap``: the share of ``reduce_ms`` that the step hides; with several ranks only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.streams import runtime_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

#: number of all-reduces in a graph
CAPTURED = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "pretend"), default="cuda")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    backend, device = _device(given.device)
    with shoal.init(backend=backend) as group:
        figures: dict[str, Any] = {"device": given.device, "ranks": group.size}
        figures |= _submission(group, device, given.rounds)
        figures["replay_us"] = _replay(group, device, given.rounds)
        figures |= _training(group, device, max(given.rounds // 10, 3))
        if given.device == "cuda":
            figures["torch_submit_us"] = _torch_submission(group, device, given.rounds)
        if group.rank == 0:
            print(json.dumps(figures), flush=True)


def _device(kind: str) -> tuple[str, torch.device]:
    if kind == "pretend":
        from tests.support import pretend_device
        from tests.support.nccl_engine import use_fake_nccl

        use_fake_nccl(pretend_device.make())
        return "fake-nccl", torch.device("pretend", 0)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return "nccl", torch.device("cuda", index)


def _submission(group: shoal.ProcessGroup, device: torch.device, rounds: int) -> dict[str, float]:
    x = torch.ones(2, device=device)
    group.all_reduce(x).wait()
    submit, order = [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        future = group.all_reduce(x)
        submitted = time.perf_counter()
        future.wait(blocking=False)
        order.append(time.perf_counter() - submitted)
        submit.append(submitted - begun)
        future.wait()
    return {"submit_us": _us(submit), "order_us": _us(order)}


def _replay(group: shoal.ProcessGroup, device: torch.device, rounds: int) -> float:
    x = torch.ones(2, device=device)
    group.all_reduce(x, "avg").wait()  # once before the capture
    with _captured(device) as replay:
        for _ in range(CAPTURED):
            group.all_reduce(x, "avg").wait(blocking=False)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        replay()
        x.sum().item()
        times.append((time.perf_counter() - begun) / CAPTURED)
    return _us(times)


@contextmanager
def _captured(device: torch.device) -> Iterator[Callable[[], object]]:
    """A context in which the current stream captures; gives a function that replays the graph."""
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph.replay
        return
    runtime: Any = runtime_of(device)
    with runtime.capture(device) as captured:
        yield lambda: captured.replay(runtime.current_stream(device))


def _torch_submission(group: shoal.ProcessGroup, device: torch.device, rounds: int) -> float:
    """The same with torch's NCCL group, in the same process."""
    import torch.distributed as dist

    folder = tempfile.mkdtemp() if group.rank == 0 else None
    address = f"file://{group.broadcast_object(folder, 0).wait()}/store"
    dist.init_process_group("nccl", init_method=address, rank=group.rank, world_size=group.size)
    x = torch.ones(2, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work = dist.all_reduce(x, async_op=True)
        times.append(time.perf_counter() - begun)
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
    dist.destroy_process_group()
    if folder is not None:
        shutil.rmtree(folder)
    return _us(times)


def _training(group: shoal.ProcessGroup, device: torch.device, rounds: int) -> dict[str, float]:
    width = 2048 if device.type == "cuda" else 16
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = shoal.DistributedDataParallel(nn.Sequential(*layers).to(device), group=group)
    x = torch.ones(64, width, device=device)
    gradients = [torch.ones_like(p) for p in model.parameters()]

    def step(alone: bool) -> None:
        with model.no_sync() if alone else nullcontext():
            model(x).sum().backward()

    def reduce() -> None:
        for future in [group.all_reduce(gradient, "avg") for gradient in gradients]:
            future.wait(blocking=False)

    def milliseconds(work: Callable[[], None]) -> float:
        times = []
        for _ in range(rounds):
            x.sum().item()  # the device is idle
            begun = time.perf_counter()
            work()
            (next(model.parameters()).sum() + gradients[0].sum()).item()
            times.append(time.perf_counter() - begun)
        return round(1e3 * statistics.median(times), 3)

    figures = {
        "step_ms": milliseconds(lambda: step(alone=False)),
        "step_alone_ms": milliseconds(lambda: step(alone=True)),
        "reduce_ms": milliseconds(reduce),
    }
    if group.size > 1:
        visible = figures["step_ms"] - figures["step_alone_ms"]
        figures["overlap"] = round(1 - visible / figures["reduce_ms"], 3)
    return figures


def _us(times: list[float]) -> float:
    return round(1e6 * statistics.median(times), 2)


if __name__ == "__main__":
    main()
