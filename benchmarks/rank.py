"""One rank of one contender: waits for orders on a socket, measures, answers.

Runs in the contender's own environment (the MPI ones have no torch), so it imports only what its
engine needs.  Orders and answers are lines of JSON.  While another contender is measured a rank sits
in ``readline`` and takes no processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from typing import Any

import numpy as np


class Gloo:
    """torch.distributed with its Gloo backend."""

    def __init__(self, control: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{control}.gloo", rank=rank, world_size=size)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.version = f"torch {torch.__version__}"

    def buffer(self, variant: str, count: int) -> Any:
        return self.torch.zeros(count)

    def all_reduce(self, buffer: Any) -> None:
        self.dist.all_reduce(buffer)

    def barrier(self) -> None:
        self.dist.barrier()

    def close(self) -> None:
        self.dist.destroy_process_group()


class Mpi:
    """An MPI library, called through mpi4py on numpy arrays, in place."""

    def __init__(self, control: str) -> None:
        from mpi4py import MPI

        self.comm, self.in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\t", " ").strip()

    def buffer(self, variant: str, count: int) -> Any:
        return np.zeros(count, np.float32)

    def all_reduce(self, buffer: Any) -> None:
        self.comm.Allreduce(self.in_place, buffer)

    def barrier(self) -> None:
        self.comm.Barrier()

    def close(self) -> None:
        """MPI is finalised when the interpreter ends."""


class Shoal:
    """shoal, on ordinary tensors or on tensors in the group's registered memory."""

    def __init__(self, control: str) -> None:
        import torch

        import shoal

        torch.set_num_threads(1)
        self.torch = torch
        self.group = shoal.init()
        self.rank, self.size = self.group.rank, self.group.size
        self.version = f"shoal {shoal.__version__}"

    def buffer(self, variant: str, count: int) -> Any:
        return self.group.empty(count) if variant == "registered" else self.torch.zeros(count)

    def all_reduce(self, buffer: Any) -> None:
        self.group.all_reduce(buffer).wait()

    def barrier(self) -> None:
        self.group.barrier().wait()

    def close(self) -> None:
        self.group.close()


ENGINES = {"gloo": Gloo, "mpi": Mpi, "shoal": Shoal}


def _check(engine: Any, buffer: Any, values: Any) -> None:
    """One all-reduce whose exact result is known; raises when any element is wrong."""
    pattern = (np.arange(len(values)) % 251).astype(np.float32)
    values[:] = pattern + engine.rank
    engine.all_reduce(buffer)
    expected = pattern * engine.size + sum(range(engine.size))
    if not np.array_equal(values, expected):
        wrong = int((values != expected).sum())
        raise ValueError(f"rank {engine.rank}: {wrong} of {len(values)} elements are wrong")


def _sample(engine: Any, buffer: Any, repeat: int) -> float:
    """Seconds for one all-reduce, averaged over ``repeat`` of them back to back, after a tenth as warm-up."""
    for _ in range(repeat // 10 + 1):
        engine.all_reduce(buffer)
    engine.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        engine.all_reduce(buffer)
    return (time.perf_counter() - start) / repeat


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--control", required=True, help="path of the coordinator's socket")
    arguments = parser.parse_args()
    engine = ENGINES[arguments.engine](arguments.control)
    buffers: dict[tuple[str, int], Any] = {}
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(arguments.control)
        with control.makefile("rw") as lines:

            def answer(**values: Any) -> None:
                lines.write(json.dumps(values) + "\n")
                lines.flush()

            answer(version=engine.version)
            while order := json.loads(lines.readline() or "{}"):
                key = (order["variant"], order["count"])
                try:
                    if key not in buffers:
                        buffers = {k: v for k, v in buffers.items() if k[1] == order["count"]}
                        buffers[key] = engine.buffer(*key)
                        values = np.asarray(buffers[key])
                        _check(engine, buffers[key], values)
                        values[:] = 0.0
                    answer(seconds=_sample(engine, buffers[key], order["repeat"]))
                except Exception as error:
                    answer(error=f"{type(error).__name__}: {error}")
                    raise
    engine.close()


if __name__ == "__main__":
    main()
