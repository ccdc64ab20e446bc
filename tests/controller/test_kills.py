"""SIGKILL at random moments: the error names the node, others go on, nothing hangs and nothing is left.

``make test`` runs 56 trials of nodes and 10 of masters, ``make stress`` 500 and 100 (100 and 20 with
``STRESS=short``).
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.node import sessions
from shoal.errors import NodeLost
from shoal.testing import no_leaks
from tests.controller import nodes
from tests.controller.nodes import BACKSTOP, SECRET, Crew, Program, programs, wait_until_gone, wait_until_lost
from tests.controller.work import WORK, left
from tests.support.waiting import until

start = pytest.fixture(programs)
Start = Callable[..., Program]
SHORT = os.environ.get("STRESS") == "short"

#: seconds from a death until the program hears of it; on an idle machine it takes milliseconds
PROMISE = 10.0


class Trials:
    """Deaths of nodes of one master, each of which is replaced."""

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew = crew
        self._choose = random.Random(seed)
        self._told: list[int] = []
        crew.master.on_lost(self._told.append)
        self._counts = [torch.zeros(1, device=each) for each in crew.master.nodes]
        self._counted = [0] * len(self._counts)
        #: by what the program did: seconds until it heard of each death
        self.delays: dict[str, list[float]] = {work.__name__: [] for work in WORK}

    def one(self, number: int) -> None:
        """Kill a node, or two, while the master works with it."""
        choose, master = self._choose, self._crew.master
        index = choose.randrange(master.count)
        survivor = (index + 1) % master.count
        dying = [index] if choose.random() < 0.9 else [index, (index + 2) % master.count]
        victim, other = torch.device("node", index), torch.device("node", survivor)
        work = WORK[number % len(WORK)]
        died: list[float] = []

        def kill() -> None:
            time.sleep(moment)
            if stopped:
                os.kill(pids[0], signal.SIGSTOP)
                time.sleep(stopped)
                if stopped < 0.01:
                    os.kill(pids[0], signal.SIGCONT)
            died.append(time.monotonic())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        moment, pids = choose.random() ** 2 * 0.02, [master.pids[each] for each in dying]
        stopped = choose.random() * 0.02 if choose.random() < 0.2 else 0.0
        killing = threading.Thread(target=kill)
        killing.start()
        with pytest.raises(NodeLost) as caught:
            self._until_lost(work, victim, other, survivor)
        heard = time.monotonic()
        killing.join()
        assert caught.value.ranks in [(each,) for each in dying], f"{work}: {caught.value}"
        self.delays[work.__name__].append(heard - died[0])
        assert heard - died[0] < PROMISE
        for each in dying:  # the error names the one that was noticed first
            wait_until_lost(master, each)
        self._check(survivor)
        # The next one may die while it comes: then it is the one after it.
        unlucky = self._crew.joining() if choose.random() < 0.2 else None
        if unlucky is not None:
            time.sleep(choose.random() * 0.05)
            unlucky.kill()
        for each in dying:
            self._crew.joining()
            master.replace(each, BACKSTOP)
            if unlucky is not None and master.pids[each] == unlucky.pid:
                self._crew.joining()
                wait_until_lost(master, each)
                master.replace(each, BACKSTOP)
            self._counts[each], self._counted[each] = torch.zeros(1, device=f"node:{each}"), 0
            assert torch.ones(2, device=f"node:{each}").tolist() == [1, 1]

    def _until_lost(
        self, work: Callable[..., None], victim: torch.device, other: torch.device, survivor: int
    ) -> None:
        deadline = time.monotonic() + BACKSTOP
        while time.monotonic() < deadline:
            self._counts[survivor] += 1
            self._counted[survivor] += 1
            work(self._crew.master, victim, other)

    def _check(self, survivor: int) -> None:
        assert self._counts[survivor].item() == self._counted[survivor]
        assert torch.arange(3, device=f"node:{survivor}").tolist() == [0, 1, 2]
        gc.collect()
        assert self._crew.master.call(survivor, left) == (0, 0)

    def table(self) -> str:
        """The delays, kind by kind, in milliseconds."""
        kinds = [*self.delays.items(), ("all", [each for kind in self.delays.values() for each in kind])]
        lines = [f"{'kind':18}{'kills':>6}{'median':>8}{'99 %':>8}{'max':>8}  ms"]
        for kind, delays in kinds:
            ms = sorted(1000 * each for each in delays) or [0.0]
            told = [ms[len(ms) // 2], ms[len(ms) * 99 // 100], ms[-1]]
            lines.append(f"{kind:18}{len(delays):6}" + "".join(f"{each:8.1f}" for each in told))
        return "\n".join(lines)


def _kill_nodes(start: Start, url: str, trials: int) -> None:
    with no_leaks():
        crew = Crew(start, url, 3)
        with crew.master:
            _ = crew.master.nodes.device
            deaths = Trials(crew, trials)
            for number in range(trials):
                deaths.one(number)
        crew.end()
        # one dies while the master closes
        crew = Crew(start, url, 2)
        x = torch.ones(300, 300, device="node:0")
        for _ in range(100):
            x = x @ x
        killer = threading.Timer(0.005, crew.workers[0].kill)
        killer.start()
        crew.master.close()
        killer.join()
        crew.end()
    print(deaths.table())


@pytest.mark.usefixtures("no_master")
def test_killed_nodes_are_named_and_replaced(start: Start, url: str) -> None:
    _kill_nodes(start, url, 2 * len(WORK))


@pytest.mark.stress
@pytest.mark.usefixtures("no_master")
def test_many_killed_nodes_are_named_and_replaced(start: Start, url: str) -> None:
    _kill_nodes(start, url, 100 if SHORT else 500)


def _left(master: Master) -> list[tuple[int, int, int]]:
    """What each node has of sessions, threads and descriptors, with what this master needs."""
    agent = master._workers.agent
    return sorted(agent.peer(name, BACKSTOP).call(_inventory).wait() for name in master._roster.surviving)


def _inventory() -> tuple[int, int, int]:
    return len(sessions._sessions), threading.active_count(), len(os.listdir("/proc/self/fd"))


def _kill_masters(start: Start, url: str, trials: int) -> None:
    choose = random.Random(trials)
    workers = [start(nodes.joins, url, SECRET) for _ in range(2)]
    for worker in workers:
        worker.told()
    for _ in range(trials):
        master = start(nodes.works, url, SECRET, 2)
        master.told()
        time.sleep(choose.random() * 0.02)
        master.kill()
        assert master.ended() == -signal.SIGKILL
        assert [worker.told() for worker in workers] == ["waits for another master"] * 2
    with shoal.init_master_worker(url=url, secret=SECRET) as last:
        last.wait_for(2, BACKSTOP)
        assert [torch.ones(2, device=each).tolist() for each in last.nodes] == [[1, 1]] * 2
        # Threads of earlier masters go within seconds.
        few = lambda: all(threads < 20 and opened < 60 for _, threads, opened in _left(last))  # noqa: E731
        until(few, lambda: _left(last))
        assert [sessions for sessions, _, _ in _left(last)] == [1, 1]
    for worker in workers:
        worker.kill()
    wait_until_gone([worker.pid for worker in workers])


@pytest.mark.usefixtures("no_master")
def test_workers_outlive_killed_masters(start: Start, url: str) -> None:
    _kill_masters(start, url, 10)


@pytest.mark.stress
@pytest.mark.usefixtures("no_master")
def test_workers_outlive_many_killed_masters(start: Start, url: str) -> None:
    _kill_masters(start, url, 20 if SHORT else 100)
