"""The training of ``cpp/ddp.cc`` in Python: the same models, steps and files.

The folder contains ``weights``, the parameters of the model as bytes, and ``inputs``, the batches.  Each rank
writes its parameters and buffers after training to TAG-MODE-RANK.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import shoal

#: in ``whole`` all gradients fit into the first bucket
MODES = ("plain", "unused", "static", "local", "whole")
STEPS = 6
#: elements of the batch of a rank; a step has two, and ``local`` uses both
BATCH = (4, 1, 4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.spare = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, with_spare: bool) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x))).flatten(1)
        if with_spare:
            y = y + self.spare(y)
        return self.last(y)


def write_inputs(folder: Path, ranks: int) -> None:
    """Write the files that all ranks read."""
    torch.manual_seed(0)
    (folder / "weights").write_bytes(_bytes(Net().parameters()))
    (folder / "inputs").write_bytes(torch.randn(STEPS * 2 * ranks, *BATCH).numpy().tobytes())


def train(group: shoal.ProcessGroup, folder: Path, tag: str) -> None:
    weights = torch.frombuffer(bytearray((folder / "weights").read_bytes()), dtype=torch.float32)
    inputs = torch.frombuffer(bytearray((folder / "inputs").read_bytes()), dtype=torch.float32)
    inputs = inputs.view(STEPS, 2, group.size, *BATCH)
    for mode in MODES:
        net = Net()
        if group.rank == 0:
            parameters = list(net.parameters())
            parts = weights.split([parameter.numel() for parameter in parameters])
            with torch.no_grad():
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.copy_(part.view(parameter.shape))
        model = shoal.DistributedDataParallel(
            net,
            group=group,
            find_unused_parameters=mode == "unused",
            static_graph=mode == "static",
            bucket_cap_mb=25 if mode == "whole" else 0.0005,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for part in (1, 0) if mode == "local" else (0,):
                with model.no_sync() if part == 1 else nullcontext():
                    with_spare = (step + group.rank) % 3 == 0 if mode == "unused" else mode != "static"
                    output = model(inputs[step, part, group.rank], with_spare)
                    output.square().mean().backward()
            optimizer.step()
        (folder / f"{tag}-{mode}-{group.rank}").write_bytes(_bytes([*net.parameters(), *net.buffers()]))


def _bytes(tensors: Iterable[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
