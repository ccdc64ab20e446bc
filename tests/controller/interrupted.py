"""A master that gets Ctrl-C at random moments, whatever it does: a program in a process of its own."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch

import shoal
from shoal.controller import Master

#: presses Ctrl-C in another process, for whose turn no interpreter has to wait
_PRESSING = """
import os, random, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(random.uniform(0, 0.004))
    os.kill(int(sys.argv[1]), 2)
"""


class Work:
    """The steps that are interrupted, by their kinds."""

    def __init__(self, master: Master) -> None:
        torch.manual_seed(0)
        self.master = master
        self.here = torch.randn(5, 4)
        self.x = self.here.to("node:0")
        self.everywhere = master.nodes.replicate(self.here)
        self.local = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.net = copy.deepcopy(self.local).to("node:0")
        self.adam = torch.optim.AdamW(self.net.parameters())
        self.stream: Any = None
        self.recorded = master.recorded(lambda a: (a * 2 + 1).relu())

    def forward(self) -> None:
        self.net(self.x).square().mean()

    def leaf(self) -> None:
        x = torch.ones(3, device="node:0", requires_grad=True)
        (x * 2).sum()

    def backward(self) -> None:
        self.net(self.x).square().mean().backward()

    def optimiser(self) -> None:
        self.net(self.x).sum().backward()
        self.adam.step()
        self.adam.zero_grad()

    def copies(self) -> None:
        y = self.x.to("node:1")
        (y + 1).to("node:0")
        self.here.to("node:0").cpu()

    def fetch(self) -> None:
        (self.x + 1).sum().item()
        self.x.tolist()
        self.master.fetch([self.x, self.x]).wait()

    def shapes(self) -> None:
        _ = self.x[self.x > 0]
        self.x.unique()

    def place(self) -> None:
        y = self.everywhere * 2
        self.master.nodes.all_reduce_(y)
        self.master.nodes.mean(y)
        y.on(1).sum()

    def call(self) -> None:
        self.master.call("node:0", torch.add, self.x, 1)

    def load(self) -> None:
        for batch in self.master.load("node:0", _batches):
            batch.sum()

    def record(self) -> None:
        self.recorded(self.x)

    def streams(self) -> None:
        if self.stream is None:
            self.stream = shoal.Stream("node:0")
        with self.stream:
            y = self.x + 1
        (y * 2).sum()

    def forget(self) -> list[int]:
        """Let go of all that steps leave; how many tensors the nodes have then."""
        self.net.zero_grad()
        self.adam.state.clear()
        gc.collect()
        self.master.synchronize()
        gc.collect()
        self.master.synchronize()
        return [each["tensors"] for each in self.master.stats()]

    def check(self) -> None:
        """Everything works, and gives what it gives without nodes."""
        self.net.load_state_dict(self.local.state_dict())
        here, there = copy.deepcopy(self.local), self.net
        for net, x in ((here, self.here), (there, self.x)):
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                sgd.zero_grad()
                net(x).square().mean().backward()
                sgd.step()
        for one, other in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.equal(one, other.cpu())
        for each in self.master.nodes.gather(self.everywhere * 1.5):
            assert torch.equal(each, self.here * 1.5)
        assert torch.equal(self.x.to("node:1").cpu(), self.here)
        assert torch.equal(self.recorded(self.x).cpu(), (self.here * 2 + 1).relu())
        assert torch.equal(self.master.call("node:0", torch.add, self.x, 1).cpu(), self.here + 1)


def _batches(index: int, count: int) -> Iterable[torch.Tensor]:
    return [torch.full((2,), float(each)) for each in range(4)]


STEPS: dict[str, Callable[[Work], None]] = {
    name: getattr(Work, name)
    for name in (
        "backward", "call", "copies", "fetch", "forward", "leaf", "load", "optimiser", "place", "record",
        "shapes", "streams",
    )
}  # fmt: skip


def is_interrupted(tell: Connection, kinds: list[str], count: int) -> None:
    """Press Ctrl-C ``count`` times in steps of each kind; tell of each what was wrong afterwards."""
    armed: list[bool] = []

    def interrupt(signalled: int, frame: FrameType | None) -> None:
        if armed:
            armed.clear()  # the next one waits until this one was caught
            raise KeyboardInterrupt

    def run_steps(kind: str, work: Work) -> None:
        # A function: the jump to the top of a loop is outside the caller's `try` in Python 3.13.
        while armed:  # Python drops what is raised in a finalizer
            STEPS[kind](work)

    signal.signal(signal.SIGINT, interrupt)
    with shoal.init_master_worker(workers=2) as master, _pressing():
        work = Work(master)
        for kind in kinds:
            for _ in range(3):
                STEPS[kind](work)
            work.check()
            before = work.forget()
            for _ in range(count):
                try:
                    armed.append(True)
                    run_steps(kind, work)
                except KeyboardInterrupt:
                    # Torch's optimisers, on any device, may leave it off, and half of a state.
                    torch.set_grad_enabled(True)
                    work.adam.state.clear()
            work.check()
            left = work.forget()
            tell.send("as before" if left == before else f"{before} tensors, {left} afterwards")
    tell.send("done")


@contextmanager
def _pressing() -> Iterator[None]:
    pressing = subprocess.Popen([sys.executable, "-I", "-S", "-c", _PRESSING, str(os.getpid())])
    try:
        yield
    finally:
        pressing.kill()
        pressing.wait()
