"""Starts the processes of a job on several hosts, through agents: a ``Crew`` of ``job/crew.py``."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Sequence

from ...errors import LaunchError, ShoalError
from ..agent_protocol import End, Start, StdinData
from ..job.crew import HostLost, Sweeping
from ..output import summary
from ..output.stdin import StdinReader
from ..ranks.environment import Job
from ..ranks.rank import JobProcess
from .agency import AgentClient, Watcher
from .fleet import Fleet, failure
from .rank import RemoteRank, Turns

#: timeout in seconds for agents to start the processes of a job
_START = 60.0
#: maximum time in seconds to write output before the loop handles other events
_TURN = 0.05
#: maximum time in seconds to send Suspend to all agents
_SUSPEND_S = 1.0


class RemoteCrew:
    """Starts one program on the slots of several hosts.

    Args:
        `fleet`: the agents of the hosts, which are ready.
        argv: the command of each process.
        stores: URL of the job's store, for each host.
        master, master_port: address for rank 0 to listen on.
        most: maximum number of ranks.
    """

    def __init__(
        self,
        fleet: Fleet,
        argv: Sequence[str],
        job: Job,
        *,
        stores: Sequence[str],
        master: str,
        master_port: str,
        most: int,
    ) -> None:
        self.size, self.spares, self.most = job.size, job.spares, most
        self._agencies = fleet.agencies
        self.slots = sum(agency.host.slots for agency in self._agencies)
        self._argv, self._job = tuple(argv), job
        self._stores, self._master, self._master_port = stores, master, master_port
        self._turns = Turns()
        self._stdin = StdinReader(lambda data: self._agencies[0].tell(StdinData(data)))
        self._selector: selectors.BaseSelector | None = None

    def watch(self, selector: selectors.BaseSelector, say: Callable[[bytes], None], lost: HostLost) -> None:
        self._selector = selector

        def gone(agency: AgentClient, ranks: Sequence[RemoteRank]) -> None:
            if not agency.is_held:
                lost(agency.host.name, agency.trouble, ranks)

        def not_started(rank: RemoteRank, text: str) -> None:
            if agency_of[rank.index].is_held:
                raise LaunchError(f"host {rank.host}: {text}")
            say(summary.not_started(LaunchError(f"host {rank.host}: {text}"), ""))

        agency_of = self._agency_of = dict[int, AgentClient]()
        for agency in self._agencies:
            agency.watcher = Watcher(gone, not_started, self._stdin.taken)
            agency.watch(selector)

    def first(self, slot: int) -> JobProcess:
        agency, store = self._place(slot)
        host = agency.host
        count = max(0, min(self.size - host.first, host.slots))
        variables = self._job.variables(
            slot, store, self._master_port, master=self._master, local=(slot - host.first, count)
        )
        return self._start(agency, slot, slot, 0, variables, newcomer=False)

    def later(self, index: int, slot: int, restart: int) -> JobProcess:
        agency, store = self._place(slot)
        host = agency.host
        if not agency.is_well:
            raise LaunchError(f"rank {slot} could not be started: host {host.name} is lost")
        variables = self._job.newcomer(
            slot, store, self._master_port, master=self._master, local=(slot - host.first, host.slots)
        )
        return self._start(agency, index, slot, restart, variables, newcomer=True)

    def _start(
        self,
        agency: AgentClient,
        index: int,
        slot: int,
        restart: int,
        variables: dict[str, str],
        *,
        newcomer: bool,
    ) -> JobProcess:
        host = agency.host
        rank = RemoteRank(
            index, slot, restart, host=host.name, agency=agency, turns=self._turns, size=self.size,
            newcomer=newcomer,
        )  # fmt: skip
        agency.add(rank)
        self._agency_of[index] = agency
        stdin = slot == 0 and not newcomer
        try:
            agency.tell(
                Start(
                    index, slot, restart, slot - host.first, self.size, self._argv, variables, newcomer, stdin
                )
            )
        except (ShoalError, UnicodeError) as error:
            raise LaunchError(f"rank {rank.name} could not be started on {host.name}: {error}") from error
        return rank

    def settle(self) -> None:
        assert self._selector is not None
        end = time.monotonic() + _START
        while not all(agency.is_settled for agency in self._agencies):
            now = time.monotonic()
            moments = [end, *(agency.next_at() for agency in self._agencies)]
            for key, _ in self._selector.select(max(0.0, min(moments) - now)):
                key.data()
            now = time.monotonic()
            for agency in self._agencies:
                agency.tick(now)
                if now >= end and not agency.is_settled:
                    agency.lose(f"its agent has not started all processes in {_START:.0f} s")
                if agency.trouble:
                    raise LaunchError(failure(agency))
        for agency in self._agencies:
            agency.is_held = False
        self._stdin.watch(self._selector)

    def can_start(self, slot: int) -> bool:
        return self._place(slot)[0].is_well

    def release(self, rank: JobProcess) -> None:
        rank.release()

    def sweep(self, ranks: Sequence[JobProcess], linger: float) -> Sweeping:
        self._stdin.close()
        for agency in self._agencies:
            agency.tell(End(linger))
            agency.expect_bye(linger)
        return _Farewell(self._agencies)

    def next_at(self) -> float | None:
        if self._turns:
            return 0.0
        look_at = self._stdin.next_at()
        found = min(agency.next_at() for agency in self._agencies)
        return look_at if found == math.inf else found if look_at is None else min(found, look_at)

    def tick(self, now: float) -> None:
        for agency in self._agencies:
            agency.tick(now)
        self._turns.take(now + _TURN)
        self._stdin.tick(now)

    def suspend(self) -> None:
        end = time.monotonic() + _SUSPEND_S
        for agency in self._agencies:
            agency.suspend()
        while not all(agency.is_told for agency in self._agencies) and time.monotonic() < end:
            time.sleep(_TURN)
            for agency in self._agencies:
                agency.flush()

    def resume(self) -> None:
        for agency in self._agencies:
            agency.resume()

    def close(self) -> None:
        self._stdin.close()
        for agency in self._agencies:
            agency.leave()

    def _place(self, slot: int) -> tuple[AgentClient, str]:
        """The client of the agent of a slot, and the URL of the store there."""
        for agency, store in zip(self._agencies, self._stores, strict=True):
            if slot in agency.host:
                return agency, store
        raise AssertionError(f"no host has slot {slot}")


class _Farewell:
    """Waits until every agent has killed the process groups of its ranks, and sent all output."""

    def __init__(self, agencies: Sequence[AgentClient]) -> None:
        self._agencies = agencies
        self.killed: list[str] = []

    def is_done(self) -> bool:
        if any(agency.killed is None and not agency.trouble for agency in self._agencies):
            return False
        self.killed = [
            f"{name} on {agency.host.name}" for agency in self._agencies for name in agency.killed or ()
        ]
        return True
