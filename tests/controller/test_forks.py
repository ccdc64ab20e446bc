"""Forked children of a master, which have none of its nodes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from shoal.controller import Master
from shoal.errors import ForkedProcess
from tests.controller import masters
from tests.controller.nodes import BACKSTOP, Program, programs, wait_until_gone

start = pytest.fixture(programs)


def _in_fork(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child, which ends then."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, pickle.dumps(work()))
        except BaseException as error:
            os.write(writing, pickle.dumps(repr(error)))
        finally:
            os._exit(0)
    os.close(writing)
    with closing(os.fdopen(reading, "rb")) as told:
        if not select.select([told], [], [], BACKSTOP)[0]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return pickle.loads(told.read())


def _errors(*attempts: Callable[[], Any]) -> list[str]:
    found = []
    for attempt in attempts:
        try:
            attempt()
            found.append("none")
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_hears_at_once_that_the_nodes_are_not_its_own(master: Master) -> None:
    place = master.nodes
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device=place.device)
    loaded = master.load("node:0", lambda index, count: iter(range(9)))
    assert next(loaded) == 0
    before = master.pids, master.count
    attempts = [
        lambda: x + 1, lambda: x * 2.5, x.tolist, x.nonzero, lambda: x.to("node:1"), lambda: y.on(0) + 1,  # type: ignore[attr-defined]
        lambda: torch.ones(3, device="node:0"), lambda: torch.ones(3).to("node:0"), lambda: repr(x),
        lambda: place.all_reduce_(y), lambda: place.gather(y), lambda: place.replicate(torch.ones(3)),
        master.synchronize, lambda: master.fetch([x]), lambda: master.call("node:0", os.getpid),
        lambda: next(loaded), lambda: next(master.load("node:0", lambda index, count: [1])),
        lambda: master.wait_for(9), lambda: master.replace(0), lambda: torch.node.synchronize(),  # type: ignore[attr-defined]
    ]  # fmt: skip

    def child() -> list[str]:
        nonlocal x, y
        found = _errors(*attempts)
        assert (torch.manual_seed(3) and torch.rand(2)).shape == (2,)
        x = y = torch.ones(1)
        attempts.clear()
        gc.collect()
        master.close()
        return found

    done = threading.Event()

    def use() -> None:
        z = torch.ones(3, device="node:1")
        while not done.is_set():
            z = z * 1.0

    using = threading.Thread(target=use)  # the lock is held at the moment of a fork
    using.start()
    try:
        for _ in range(5):
            assert _in_fork(child) == [ForkedProcess.__name__] * len(attempts)
    finally:
        done.set()
        using.join()
    assert (x + 1).tolist() == [2, 2, 2]
    assert [each.tolist() for each in place.gather(y)] == [[1, 1, 1]] * 3
    assert (master.pids, master.count) == before
    assert list(loaded) == list(range(1, 9))


def _uses(tensor: torch.Tensor, told: Any) -> None:
    told.send(_errors(lambda: tensor + 1))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_ends_leaves_the_tensors_of_its_parent(master: Master) -> None:
    x = torch.ones(3, device="node:0")
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    with told, tell:
        child = context.Process(target=_uses, args=(x, tell))
        child.start()
        assert told.poll(BACKSTOP)
        assert told.recv() == [ForkedProcess.__name__]
        child.join(BACKSTOP)
        assert child.exitcode == 0
        child.close()
    master.synchronize()
    assert (x + 1).tolist() == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_are_forks_of_the_master(master: Master) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = [x.to("node:0") * 2 for (x,) in loader]
    assert torch.cat(batches).flatten().tolist() == [2.0 * i for i in range(8)]


@pytest.mark.usefixtures("no_master")
def test_a_child_that_outlives_its_master_does_not_keep_the_nodes(start: Callable[..., Program]) -> None:
    program = start(masters.forks)
    nodes, child = program.told()
    try:
        program.kill()
        assert program.ended() == -signal.SIGKILL
        wait_until_gone(nodes)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("no_master")
def test_a_master_closes_while_a_forked_child_lives(start: Callable[..., Program]) -> None:
    program = start(masters.closes_beside_a_fork)
    child = program.told()
    try:
        assert program.told() == "closed"
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("no_master")
def test_a_forked_child_may_be_a_master_itself(start: Callable[..., Program]) -> None:
    program = start(masters.forks_a_master)
    assert program.told() == [2.0, 2.0]
    assert program.told() == "ForkedProcess"
    assert program.told() == [3.0, 3.0]
    assert program.ended() == 0
