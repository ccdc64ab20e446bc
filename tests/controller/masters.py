"""Programs of masters that the tests kill, or whose nodes they kill: each runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch

import shoal
from shoal.controller.commands import connection
from tests.controller import delays
from tests.controller.nodes import BACKSTOP
from tests.support.quick_workers import start_python


def loses_a_node(tell: Connection) -> None:
    """Kill node 0 while operations are issued to it, and use what is left."""
    master = shoal.init_master_worker(workers=2)
    tell.send(master.pids)
    told: list[int] = []
    heard = threading.Event()

    def fails(index: int) -> None:
        raise asyncio.CancelledError

    master.on_lost(fails)
    master.on_lost(lambda index: (told.append(index), heard.set()))
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    both = master.nodes
    z = torch.ones(3, device=both.device)
    master.synchronize()
    os.kill(master.pids[0], signal.SIGKILL)

    def for_ever() -> None:
        while True:
            _ = x + 1

    lost = []
    attempts = [
        for_ever, x.sum, x.tolist, master.synchronize, lambda: torch.zeros(1, device="node:0"),
        z.sum, lambda: both.gather(z), lambda: both.replicate(torch.ones(1)), lambda: z.on(0).sum(),
    ]  # fmt: skip
    for attempt in attempts:
        try:
            attempt()
        except shoal.NodeLost as error:
            lost.append((error.worker, error.ranks))
    assert lost == [("node0", (0,))] * len(attempts)
    assert (y + 1).tolist() == [2, 2, 2]
    assert (z.on(1) + 1).tolist() == [2, 2, 2]  # what the other node has of it
    assert heard.wait(BACKSTOP)
    assert told == [0]
    master.close()
    tell.send("done")


def loses_a_node_that_others_wait_for(tell: Connection) -> None:
    """Kill node 0 while streams of it and of node 1 wait for it."""
    master = shoal.init_master_worker(workers=2)
    tell.send(master.pids)
    busy, waits, near = shoal.Stream("node:0"), shoal.Stream("node:1"), shoal.Stream("node:0")
    x, y = torch.ones(1500, 1500, device="node:0"), torch.ones(3, device="node:1")
    master.synchronize()
    with busy:
        for _ in range(1000):
            x = x @ x
    event = busy.record_event()
    event.wait(waits)
    event.wait(near)
    with waits:
        z = y + 1
    assert not event.query()
    os.kill(master.pids[0], signal.SIGKILL)
    lost = []
    attempts = [event.synchronize, event.query, busy.synchronize, near.query, master.synchronize, x.tolist]
    for attempt in attempts:
        try:
            attempt()
        except shoal.NodeLost as error:
            lost.append(error.ranks)
    assert lost == [(0,)] * len(attempts)
    assert z.tolist() == [2, 2, 2]
    assert (y * 3).tolist() == [3, 3, 3]
    master.close()
    tell.send("done")


def works_for_ever(tell: Connection) -> None:
    """Keep a node busy."""
    master = shoal.init_master_worker(workers=2)
    x = torch.ones(500, 500, device="node:0")
    tell.send(master.pids)
    while True:
        x = x @ x


def dies_before_its_nodes_have_joined(tell: Connection) -> None:
    """Die as soon as a node's process was started."""

    start_python()

    class Noted(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            tell.send([self.pid])
            os.kill(os.getpid(), signal.SIGKILL)

    subprocess.Popen = Noted  # type: ignore[misc, assignment]
    shoal.init_master_worker(workers=1)


def left_of_torch() -> list[bool]:
    """Whether torch is as it was before there was a master, part by part."""
    return [
        torch._C._is_multithreading_enabled(),
        not torch.__future__.get_swap_module_params_on_conversion(),
        not torch.accelerator.is_available(),
        torch.zeros(1).device.type == "cpu",
    ]


def fails_unseen_and_begins_again(tell: Connection) -> None:
    """Close a master of whose failure nobody knows, make another one, and end without closing that."""
    first = shoal.init_master_worker(workers=1)
    assert (torch.accelerator.is_available(), torch.accelerator.device_count()) == (True, 1)
    lost = torch.ones(3, device="node:0")[torch.tensor([5], device="node:0")]
    torch.ones(1, device="node:0").item()  # it has failed by now
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first.close()
    tell.send([str(each.message) for each in caught])
    tell.send(left_of_torch())
    try:
        lost + 1  # an operator must not take the error for an operand that does not fit
    except shoal.NodeLost as error:
        tell.send(str(error))
    second = shoal.init_master_worker(workers=1)
    tell.send(second.pids + first.pids)
    tell.send(torch.ones(1, device="node:0").item())


def forks(tell: Connection) -> None:
    """Fork a child that does nothing, and write what fills the pipes of nodes."""
    master = shoal.init_master_worker(workers=2)
    child = os.fork()
    if not child:
        signal.pause()
    tell.send((master.pids, child))
    signal.pause()


def closes_beside_a_fork(tell: Connection) -> None:
    """Close while a forked child lives."""
    with shoal.init_master_worker(workers=1):
        child = os.fork()
        if not child:
            signal.pause()
        tell.send(child)
    tell.send("closed")


def closes_while_a_node_is_busy(tell: Connection) -> None:
    """Close while a node does nothing any more, and more was issued than it takes ahead."""
    with shoal.init_master_worker(workers=1) as master:
        (node,) = master._nodes
        node.call(delays.know_naps).wait()
        x = delays.held(torch.ones(2, device="node:0"))
        while len(node.streams[0].batches) < connection.MAX_UNACKNOWLEDGED_BATCHES:
            x = x + 1
            with master._lock:
                node.streams[0].flush()
    tell.send("closed")


def forks_a_master(tell: Connection) -> None:
    """Fork a child that has nodes of its own."""
    with shoal.init_master_worker(workers=1):
        x = torch.ones(2, device="node:0")
        child = os.fork()
        if not child:
            with shoal.init_master_worker(workers=1):
                tell.send((torch.ones(2, device="node:0") + 1).tolist())
                try:
                    x + 1
                except shoal.ShoalError as error:
                    tell.send(type(error).__name__)
            os._exit(0)
        os.waitpid(child, 0)
        tell.send((x + 2).tolist())


def cannot_start(tell: Connection) -> None:
    """Start a node whose program fails."""
    start_python()
    sys.executable = "/bin/false"
    try:
        shoal.init_master_worker(workers=1)
    except shoal.LaunchError as error:
        tell.send(str(error))


def is_interrupted(tell: Connection) -> None:
    """Press Ctrl-C again and again while operations are issued and waited for."""
    armed: list[bool] = []
    done = threading.Event()

    def interrupt(signalled: int, frame: FrameType | None) -> None:
        if armed:
            armed.clear()  # the next one waits until this one was caught
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)  # before there is a master, which keeps it from torch's C++
    master = shoal.init_master_worker(workers=2)
    x = torch.ones(3, device="node:0")
    counted = torch.zeros(2, device=master.nodes.device)

    def press() -> None:
        while not done.wait(random.uniform(0, 0.005)):
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        for _ in range(300):
            try:
                armed.append(True)
                while armed:  # Python drops what is raised in a finalizer
                    y = (x * 1.5).reshape(3, 1)
                    counted += 1  # which closes the node's own log, and is closed by it
                    if random.random() < 0.1:
                        y.tolist()
            except KeyboardInterrupt:
                assert not armed
    finally:
        armed.clear()  # what else was raised is printed whole
        done.set()
        pressing.join()
    tell.send((x * 1.5).tolist())
    one, other = master.nodes.gather(counted)
    assert one.tolist() == other.tolist()  # every command reached both nodes, or none
    master.synchronize()
    master.close()
    tell.send("done")
