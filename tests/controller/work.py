"""What a master does with its nodes, kind by kind, for tests that end it in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.controller import Master
from shoal.controller.node import loader, sessions


def left() -> tuple[int, int]:
    """On a node: loaders, and results of calls that nobody has dropped."""
    (session,) = sessions._sessions.values()
    tensors = [each for stream in session.streams.values() for each in stream._spaces.values()]
    return len(loader._loadings), sum(len(each._called) for each in tensors)


def operations(master: Master, victim: torch.device, other: torch.device) -> None:
    x = torch.ones(8, device=victim)
    for _ in range(100):
        x = x * 1.0 + 0.0
    x.sum().item()


def fetch(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(1 << 18, device=victim).cpu()


def upload(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(1 << 18).to(victim)


def large_upload(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(1 << 22).to(victim).sum().item()


def copy_away(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(1 << 16, device=victim).to(other)


def copy_there(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(1 << 16, device=other).to(victim).sum().item()


def awaited_copy(master: Master, victim: torch.device, other: torch.device) -> None:
    """The program waits for a node that waits for the one that dies."""
    x = torch.ones(256, 256, device=victim)
    for _ in range(20):
        x = x @ x
    x.to(other).nonzero()


def asked(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(8, device=victim).nonzero()


def backward(master: Master, victim: torch.device, other: torch.device) -> None:
    w = torch.ones(8, device=victim, requires_grad=True)
    for _ in range(10):
        (w * 2).sum().backward()  # type: ignore[no-untyped-call]


def on_place(master: Master, victim: torch.device, other: torch.device) -> None:
    team = master.nodes
    team.gather(team.replicate(torch.ones(64)) + 1)


def collectives(master: Master, victim: torch.device, other: torch.device) -> None:
    team = master.nodes
    x = team.replicate(torch.ones(1 << 14))
    for _ in range(5):
        team.average_([x])
    team.gather(team.all_reduce_(x))


def call(master: Master, victim: torch.device, other: torch.device) -> None:
    assert master.call(victim, summed, torch.ones(64, device=victim)) == 640


def call_on_place(master: Master, victim: torch.device, other: torch.device) -> None:
    assert master.call(master.nodes, summed, torch.ones(64)) == [640] * master.count


def summed(x: torch.Tensor) -> float:
    return sum(float(x.sum()) for _ in range(10))


def batches(index: int, count: int) -> Iterator[torch.Tensor]:
    for _ in range(10):
        yield torch.ones(1 << 12)


def load(master: Master, victim: torch.device, other: torch.device) -> None:
    for x in master.load(victim, batches):
        x.sum()


def load_on_place(master: Master, victim: torch.device, other: torch.device) -> None:
    for x in master.load(master.nodes, batches):
        x.sum()


def record(master: Master, victim: torch.device, other: torch.device) -> None:
    """Calls are recorded, and those after them replayed."""
    w = torch.ones(8, device=victim)

    @master.recorded
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x * w
        return x.sum()

    for _ in range(5):
        step(w)
    assert step(w).item() == 8


def synchronize(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.ones(8, device=victim)
    master.synchronize()


#: each takes the master, a node, and another node
WORK = [
    operations, fetch, upload, large_upload, copy_away, copy_there, awaited_copy, asked, backward,
    on_place, collectives, call, call_on_place, load, load_on_place, record, synchronize,
]  # fmt: skip
