"""Programs that copy between nodes, at random; some of them lose a node meanwhile."""

from __future__ import annotations

import os
import random
import signal
import threading
from multiprocessing.connection import Connection

import torch

import shoal


def random_steps(
    draw: random.Random, there: list[torch.Tensor], here: list[torch.Tensor], nodes: int, steps: int
) -> None:
    """The same steps with tensors of nodes and with local ones."""
    for _ in range(steps):
        i, j, node = draw.randrange(len(there)), draw.randrange(len(there)), draw.randrange(nodes)
        kind = draw.random()
        if kind < 0.5:
            stays = there[j].device.index == node
            there[i], here[i] = there[j].to(f"node:{node}"), here[j] if stays else here[j].clone()
        elif kind < 0.7 and here[i].shape == here[j].shape:
            there[i].copy_(there[j])
            here[i].copy_(here[j])
        elif kind < 0.8:
            there[i], here[i] = there[i] + 1, here[i] + 1
        elif kind < 0.97:
            there[i].mul_(0.5)
            here[i].mul_(0.5)
        else:
            assert there[i][-1].item() == here[i][-1].item()


def loses_a_node_of_three(tell: Connection) -> None:
    """Copy at random between three nodes, in circles too, and lose the last of them meanwhile."""
    with shoal.init_master_worker(workers=3) as master:
        draw = random.Random()
        there = [torch.full((4 if i % 3 else 100_000,), float(i), device=f"node:{i % 3}") for i in range(6)]
        here = [each.cpu() for each in there]
        random_steps(draw, there, here, 3, 400)
        circle = [torch.full((50_000,), float(i), device=f"node:{i}") for i in range(3)]
        for _ in range(30):
            circle = [circle[(i + 1) % 3].to(f"node:{i}") for i in range(3)]
        assert [each[0].item() for each in circle] == [0, 1, 2]
        assert all(torch.equal(each.cpu(), local) for each, local in zip(there, here, strict=True))
        tell.send("computed")

        kept = [torch.ones(3, device="node:0"), torch.ones(3, device="node:1")]
        lost = torch.ones(100_000, device="node:2")
        killer = threading.Timer(random.uniform(0, 0.02), os.kill, (master.pids[2], signal.SIGKILL))
        killer.start()
        derived = []
        try:
            while True:
                derived.append(lost.to(f"node:{draw.randrange(2)}"))
                lost = derived[-1].to("node:2")
                kept = [kept[1].to("node:0"), kept[0].to("node:1")]
                if len(derived) > 20:
                    derived[0][0].item()
                    del derived[0]
        except shoal.NodeLost as error:
            check(error)
        for each in derived:  # what had come is there, what had not is lost
            try:
                assert each[-1].item() == 1
            except shoal.NodeLost as error:
                check(error)
        tell.send("lost")
        killer.join()
        goes_on(kept)
    tell.send("done")


def check(error: shoal.NodeLost) -> None:
    """It names the node that was killed."""
    assert error.ranks == (2,), error


def goes_on(kept: list[torch.Tensor]) -> None:
    """The other nodes have their tensors, and copy."""
    for _ in range(50):
        kept = [kept[1].to("node:0"), kept[0].to("node:1")]
    assert [each.tolist() for each in kept] == [[1] * 3] * 2


def loses_a_node_at_a_large_copy(tell: Connection) -> None:
    """Lose a node, the sender or the receiver, while a large tensor goes there and back."""
    with shoal.init_master_worker(workers=3) as master:
        kept = [torch.ones(3, device="node:0"), torch.ones(3, device="node:1")]
        large = torch.ones(4 << 20, device="node:0")
        master.synchronize()
        killer = threading.Timer(random.uniform(0, 0.1), os.kill, (master.pids[2], signal.SIGKILL))
        killer.start()
        try:
            while True:
                large = large.to("node:2").to("node:1").to("node:2").to("node:0")
                assert large[-1].item() == 1
        except shoal.NodeLost as error:
            check(error)
        killer.join()
        goes_on(kept)
    tell.send("done")
