"""What a master does with its nodes, kind by kind, for tests that end it in the middle."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from unittest import mock

import torch

import shoal
from shoal.controller import Master
from shoal.controller.commands import connection
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


def fetch_many(master: Master, victim: torch.device, other: torch.device) -> None:
    there = [torch.ones(1 << 12, device=each) for each in (victim, other) for _ in range(5)]
    master.fetch(there).wait()


def many_uploads(master: Master, victim: torch.device, other: torch.device) -> None:
    """The program waits until the node has taken some of them."""
    x = torch.ones(1 << 18)
    with mock.patch.object(connection, "MAX_UPLOAD_BYTES", 3 * x.nbytes):
        for _ in range(10):
            x.to(victim, non_blocking=True)


def far_ahead(master: Master, victim: torch.device, other: torch.device) -> None:
    """The program waits until the node has done some of its operations."""
    x = torch.ones(128, 128, device=victim)
    with mock.patch.object(connection, "MAX_PENDING_COMMANDS", 100):
        for _ in range(300):
            x = x @ x


def backward_between(master: Master, victim: torch.device, other: torch.device) -> None:
    """A graph that goes to another node and comes back."""
    w = torch.ones(64, device=victim, requires_grad=True)
    v = torch.ones(64, device=other, requires_grad=True)
    for _ in range(5):
        ((w * 2).to(other) * v).to(victim).sum().backward()  # type: ignore[no-untyped-call]


def load_saved(master: Master, victim: torch.device, other: torch.device) -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(1 << 14), "y": torch.zeros(8)}, file)
    file.seek(0)
    assert torch.load(file, map_location=victim)["y"].tolist() == [0] * 8


def replay_on_place(master: Master, victim: torch.device, other: torch.device) -> None:
    """Replay a step with collectives, and with copies between nodes."""
    team = master.nodes

    @master.recorded
    def step(x: torch.Tensor) -> torch.Tensor:
        y = team.all_reduce_(x * 2, "max")
        return y.on(victim.index).to(other) + y.on(other.index)  # type: ignore[attr-defined,no-any-return]

    x = team.replicate(torch.ones(16))
    for _ in range(8):
        assert step(x).tolist() == [4] * 16


def explain(master: Master, victim: torch.device, other: torch.device) -> None:
    x = torch.ones(8, device=victim) + 1
    master.explain(x)
    x.sum().item()


def trace(master: Master, victim: torch.device, other: torch.device) -> None:
    with tempfile.TemporaryDirectory() as folder, master.trace(f"{folder}/t.json"):
        operations(master, victim, other)


def random_numbers(master: Master, victim: torch.device, other: torch.device) -> None:
    torch.manual_seed(1)
    torch.rand(100, device=victim)
    torch.node.get_rng_state(victim)  # type: ignore[attr-defined]


def streams(master: Master, victim: torch.device, other: torch.device) -> None:
    """Streams of both nodes are busy with tensors of each other."""
    sides = [shoal.Stream(victim), shoal.Stream(victim), shoal.Stream(other), shoal.Stream(master.nodes)]
    x, y = (torch.ones(64, 64, device=each) for each in (victim, other))
    both = master.nodes.replicate(torch.ones(64))
    for side in sides:
        with side:
            for _ in range(10):
                x, y = x @ x, y @ y
            both.add_(1)
            y += x.to(other)
    torch.stack([y, y]).sum().item()


def events(master: Master, victim: torch.device, other: torch.device) -> None:
    """Streams of another node wait for events of the one that dies, and the program does."""
    side, far = shoal.Stream(victim), shoal.Stream(other)
    x, y = torch.ones(128, 128, device=victim), torch.ones(8, device=other)
    begin, end = shoal.Event(enable_timing=True), shoal.Event(enable_timing=True)
    begin.record(side)
    with side:
        for _ in range(20):
            x = x @ x
    end.record(side)
    end.wait(far)
    with far:
        y += 1
    assert y.sum().item() == 16
    begin.elapsed_time(end)
    side.synchronize()


#: each takes the master, a node, and another node; from the first with streams on, the master has several
WORK = [
    operations, fetch, upload, large_upload, copy_away, copy_there, awaited_copy, asked, backward,
    on_place, collectives, call, call_on_place, load, load_on_place, record, synchronize,
    fetch_many, many_uploads, far_ahead, backward_between, load_saved, replay_on_place, explain, trace,
    random_numbers, streams, events,
]  # fmt: skip
