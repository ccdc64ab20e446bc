"""Programs whose nodes compute together, and lose one of them."""

from __future__ import annotations

import os
import random
import signal
import threading
from multiprocessing.connection import Connection

import torch

import shoal
from tests.controller.copying import check


def loses_a_node(tell: Connection) -> None:
    """Lose node 2 in a collective, and go on with the others, their groups among them."""
    with shoal.init_master_worker(workers=3) as master:
        place, pair = master.nodes, master.place([0, 1])
        x = torch.ones(random.choice([10, 1_000_000]), device=place.device)
        y, kept = torch.ones(3, device=pair.device), torch.ones(3, device="node:1")
        pair.all_reduce_(y, op="avg")
        if random.random() < 0.5:
            place.all_reduce_(x, op="avg")
        master.synchronize()
        killer = threading.Timer(random.uniform(0, 0.05), os.kill, (master.pids[2], signal.SIGKILL))
        killer.start()
        try:
            while True:
                place.all_reduce_(x, op="avg")
                if random.random() < 0.1:
                    assert place.mean(x)[-1].item() == 1
        except shoal.NodeLost as error:
            check(error)
        try:
            x.on(0)[-1].item()
        except shoal.NodeLost as error:
            check(error)
        tell.send("lost")
        killer.join()
        for _ in range(10):
            pair.all_reduce_(y, op="avg")
        assert y.on(1).tolist() == [1] * 3
        assert kept.tolist() == [1] * 3
    tell.send("done")
