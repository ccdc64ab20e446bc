"""Starts the processes of a job on several hosts, through agents."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence

from ...errors import LaunchError, ShoalError
from ..agent_protocol import End, Start, StdinData, Suspend
from ..job.rank_launcher import Cleanup, HostLost, RankLauncher
from ..output import summary
from ..output.stdin import StdinReader
from ..ranks.environment import Job
from ..ranks.rank import JobProcess
from .agent_client import AgentCallbacks, AgentClient, RemoteRank
from .agent_pool import START_TIMEOUT_S, AgentPool, describe_failure
from .output_relay import OutputRelay

#: maximum time in seconds to write output before the loop handles other events
_POLL_INTERVAL_S = 0.05
#: maximum time in seconds to send Suspend to all agents
_SUSPEND_S = 1.0


class RemoteRankLauncher(RankLauncher):
    """Starts one program on the slots of several hosts.

    Args:
        pool: the agents of the hosts, which are ready.
        stores: URL of the job's store, for each host.
        master, master_port: see :meth:`Job.variables`.
    """

    def __init__(
        self,
        pool: AgentPool,
        argv: Sequence[str],
        job: Job,
        *,
        stores: Sequence[str],
        master: str,
        master_port: str,
        max_ranks: int,
    ) -> None:
        super().__init__(job, max_ranks, sum(agent.host.slots for agent in pool.agents))
        self._agents = pool.agents
        self._argv = tuple(argv)
        self._stores, self._master, self._master_port = stores, master, master_port
        #: Writing short lines takes longer than receiving them, and must not delay exits and heartbeats.
        self._relays: deque[OutputRelay] = deque()
        self._has_started = False
        self._stdin = StdinReader(lambda data: self._agents[0].send_frame(StdinData(data)))

    def watch(self, selector: selectors.BaseSelector, say: Callable[[bytes], None], lost: HostLost) -> None:
        super().watch(selector, say, lost)

        def gone(agent: AgentClient, ranks: Sequence[RemoteRank]) -> None:
            if self._has_started:
                lost(agent.host.name, agent.failure, ranks)

        def not_started(rank: RemoteRank, text: str) -> None:
            if not self._has_started:
                raise LaunchError(f"host {rank.host}: {text}")
            say(summary.not_started(LaunchError(f"host {rank.host}: {text}"), ""))

        for agent in self._agents:
            agent.watcher = AgentCallbacks(gone, not_started, self._stdin.taken)
            agent.watch(selector)

    def start(self, index: int, slot: int, restart: int, *, newcomer: bool) -> JobProcess:
        agent, store = self._place(slot)
        host = agent.host
        if newcomer and not agent.is_usable:
            raise LaunchError(f"rank {slot} could not be started: host {host.name} is lost")
        local = slot - host.first, host.slots if newcomer else host.initial_ranks(self.size)
        variables = self._job.variables(
            slot, store, self._master_port, master=self._master, local=local, newcomer=newcomer
        )
        rank = RemoteRank(
            index, slot, restart, agent=agent, relays=self._relays, size=self.size, newcomer=newcomer
        )
        agent.add(rank)
        start = Start(
            index=index, slot=slot, restart=restart, place=slot - host.first, size=self.size,
            argv=self._argv, variables=variables, newcomer=newcomer, stdin=slot == 0 and not newcomer,
        )  # fmt: skip
        try:
            agent.send_frame(start)
        except (ShoalError, UnicodeError) as error:
            raise LaunchError(f"rank {rank.name} could not be started on {host.name}: {error}") from error
        return rank

    def wait_started(self) -> None:
        assert self._selector is not None
        end = time.monotonic() + START_TIMEOUT_S
        while not all(agent.has_replied for agent in self._agents):
            now = time.monotonic()
            moments = [end, *(agent.next_at() for agent in self._agents)]
            for key, _ in self._selector.select(max(0.0, min(moments) - now)):
                key.data()
            now = time.monotonic()
            for agent in self._agents:
                agent.tick(now)
                if now >= end and not agent.has_replied:
                    agent.mark_lost(f"its agent has not started all processes in {START_TIMEOUT_S:.0f} s")
                if agent.failure:
                    raise LaunchError(describe_failure(agent))
        self._has_started = True
        self._stdin.watch(self._selector)

    def can_start(self, slot: int) -> bool:
        return self._place(slot)[0].is_usable

    def release(self, rank: JobProcess) -> None:
        rank.release()

    def sweep(self, ranks: Sequence[JobProcess], linger: float) -> Cleanup:
        self._stdin.close()
        for agent in self._agents:
            agent.send_frame(End(linger))
            agent.expect_bye(linger)
        return _ByeWaiter(self._agents)

    def next_at(self) -> float:
        if self._relays:
            return 0.0
        return min(self._stdin.retry_at, *(agent.next_at() for agent in self._agents))

    def tick(self, now: float) -> None:
        for agent in self._agents:
            agent.tick(now)
        while self._relays:
            self._relays.popleft().turn()
            if time.monotonic() >= now + _POLL_INTERVAL_S:
                break
        self._stdin.tick(now)

    def suspend(self) -> None:
        end = time.monotonic() + _SUSPEND_S
        for agent in self._agents:
            agent.send_frame(Suspend())
        while not all(agent.is_flushed for agent in self._agents) and time.monotonic() < end:
            time.sleep(_POLL_INTERVAL_S)
            for agent in self._agents:
                agent.flush()

    def resume(self) -> None:
        for agent in self._agents:
            agent.resume()

    def close(self) -> None:
        self._stdin.close()
        for agent in self._agents:
            agent.unwatch()

    def _place(self, slot: int) -> tuple[AgentClient, str]:
        """The client of the agent of a slot, and the URL of the store there."""
        for agent, store in zip(self._agents, self._stores, strict=True):
            if slot in agent.host:
                return agent, store
        raise AssertionError(f"no host has slot {slot}")


class _ByeWaiter:
    """Waits until every agent has killed the process groups of its ranks, and sent all output."""

    def __init__(self, agents: Sequence[AgentClient]) -> None:
        self._agents = agents
        self.killed: list[str] = []

    def is_done(self) -> bool:
        if any(agent.killed is None and not agent.failure for agent in self._agents):
            return False
        self.killed = [
            f"{name} on {agent.host.name}" for agent in self._agents for name in agent.killed or ()
        ]
        return True
