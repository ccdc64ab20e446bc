"""The agents of all hosts of a job: their start, and the addresses of hosts and launcher."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ... import config
from ...common.formatting import printable
from ...errors import LaunchError
from ...rendezvous.addresses import address_on_route_to, is_local_address
from ..agent_protocol import Begin, Preload
from ..job.signals import Signals
from .agent_client import AgentClient
from .hosts import Host
from .ssh import SshProcess, command

#: timeout in seconds for agents to connect or to start processes, long enough for Python on a network disk
START_TIMEOUT_S = 60.0
#: maximum time in seconds for an agent to import the modules of ``--preload``
PRELOAD_TIMEOUT_S = 600.0
#: seconds for the programs that connect to agents to exit before they are killed
_EXIT_TIMEOUT_S = 3.0

LOOPBACK = "127.0.0.1"


class AgentPool:
    """Starts an agent on each host.

    Args:
        hosts: the hosts that have ranks, or may get some.
        python: the interpreter that runs the agents.
        signals: signals of the launcher; a stop signal cancels the start.

    Attributes:
        agents: the client of the agent of each host.
    """

    def __init__(self, hosts: Sequence[Host], python: str, signals: Signals) -> None:
        self.agents: list[AgentClient] = []
        self._hosts = hosts
        self._signals = signals
        try:
            self._start(python)
        except BaseException:
            self.close()
            raise

    def _start(self, python: str) -> None:
        for host in self._hosts:
            name = "the agent" if host.is_local else "ssh"
            self.agents.append(AgentClient(host, SshProcess(command(host, python), name)))

    def connect(self) -> None:
        """Wait until all agents have sent Hello.

        Raises:
            LaunchError: an agent is lost; the message names its host, with the output of ssh.
            Stopped: a stop signal came.
        """
        self._wait_until(lambda agent: agent.hello is not None, "has not answered")

    def begin(
        self,
        directory: str,
        environment: Mapping[str, str],
        ranks: Sequence[int],
        *,
        bind: bool,
        preload: Preload | None,
    ) -> None:
        """Send :class:`Begin` to all agents, and wait until they are ready; raises as :meth:`connect`."""
        for agent, count in zip(self.agents, ranks, strict=True):
            agent.send_frame(Begin(directory, dict(environment), count, bind, preload))
        seconds = START_TIMEOUT_S if preload is None else PRELOAD_TIMEOUT_S
        self._wait_until(lambda agent: agent.is_ready, "was not ready", seconds)

    def _wait_until(
        self, done: Callable[[AgentClient], bool], what: str, seconds: float = START_TIMEOUT_S
    ) -> None:
        end = time.monotonic() + seconds
        what = f"{what} in {seconds:.0f} s"
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ, lambda: None)
            try:
                for agent in self.agents:
                    agent.watch(selector)
                while not all(map(done, self.agents)):
                    moments = [end, *(agent.next_at() for agent in self.agents)]
                    for key, _ in selector.select(max(0.0, min(moments) - time.monotonic())):
                        key.data()
                    self._check(done, end, what)
            finally:
                for agent in self.agents:
                    agent.unwatch()

    def _check(self, done: Callable[[AgentClient], bool], end: float, what: str) -> None:
        self._signals.raise_if_stopped()
        now = time.monotonic()
        for agent in self.agents:
            agent.tick(now)
            if now >= end and not done(agent):
                agent.mark_lost(f"its agent {what}")
            if agent.failure:
                raise LaunchError(describe_failure(agent))

    def close(self) -> None:
        end = time.monotonic() + _EXIT_TIMEOUT_S
        for agent in self.agents:
            agent.disconnect()
        for agent in self.agents:
            agent.close(max(0.0, end - time.monotonic()))

    # -- addresses -----------------------------------------------------------------------------

    def launcher_addresses(self) -> list[str]:
        """The address of this machine for each host.

        It is ``SHOAL_INTERFACE``, or the source of the host's ssh connection, or the address on the route to
        the host.  This machine, as a host, uses the address for another host, because its ranks listen there.

        Raises:
            LaunchError: no address was found.
        """
        found = [None if agent.host.is_local else self._launcher_address(agent) for agent in self.agents]
        default = next((each for each in found if each is not None), LOOPBACK)
        return [each or default for each in found]

    def master_address(self) -> str:
        """The address of the first host for the other hosts."""
        first = self.agents[0]
        assert first.hello is not None
        if first.host.is_local:
            return self.launcher_addresses()[0]
        return first.hello.address or _bare(first.host)

    def _launcher_address(self, agent: AgentClient) -> str:
        assert agent.hello is not None
        configured = config.INTERFACE.get()
        told = agent.hello.launcher
        with suppress(OSError, UnicodeError):
            if configured is not None:
                return str(socket.getaddrinfo(configured, 0, type=socket.SOCK_STREAM)[0][4][0])
            if told and is_local_address(told):
                return told
            name = agent.hello.address or _bare(agent.host)
            return address_on_route_to(str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]))
        if configured is not None:
            raise LaunchError(f"SHOAL_INTERFACE={configured!r} is not an address of this machine")
        raise LaunchError(
            f"host {agent.host.name}: found no address of this machine that it can reach; set SHOAL_INTERFACE"
        )


def describe_failure(agent: AgentClient) -> str:
    """Why a host could not be used, with the last lines of its output."""
    noise = bytes(agent.noise).decode(errors="replace").splitlines()[-5:]
    stderr_tail = [*map(printable, noise), *agent.transport.stderr_tail]
    lines = "".join(f"\n  | {line}" for line in stderr_tail)
    return f"host {agent.host.name}: {agent.failure}" + (f"\nits output:{lines}" if lines else "")


def _bare(host: Host) -> str:
    """The name of a host without user and without the brackets of an IPv6 address."""
    return host.name.rpartition("@")[2].strip("[]")
