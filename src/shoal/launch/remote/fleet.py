"""The agents of all hosts of a job: their start, and the addresses of hosts and launcher."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ... import config
from ...common.wording import printable
from ...errors import LaunchError
from ...rendezvous.host import address_towards, is_mine
from ..agent_protocol import Begin
from ..job.signals import STOP, Signals
from .agency import AgentClient
from .hosts import Host
from .ssh import Client, command

#: timeout in seconds for agents to connect, long enough to start Python from a network disk
_START = 60.0
#: seconds for the programs that connect to agents to exit before they are killed
_END = 3.0

LOOPBACK = "127.0.0.1"


class Stopped(Exception):
    """A signal ended the launcher before a rank was started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Fleet:
    """Starts an agent on each host.

    Args:
        hosts: the hosts that have ranks, or may get some.
        python: the interpreter that runs the agents.
        signals: signals of the launcher; a stop signal cancels the start.

    Attributes:
        `agencies`: the client of the agent of each host.
    """

    def __init__(self, hosts: Sequence[Host], python: str, signals: Signals) -> None:
        self.agencies: list[AgentClient] = []
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
            self.agencies.append(AgentClient(host, Client(command(host, python), name)))

    def connect(self) -> None:
        """Wait until all agents have sent Hello.

        Raises:
            LaunchError: an agent is lost; the message names its host, with the output of ssh.
            Stopped: a stop signal came.
        """
        self._wait(lambda agency: agency.hello is not None, "has not answered")

    def begin(
        self, directory: str, environment: Mapping[str, str], ranks: Sequence[int], *, bind: bool
    ) -> None:
        """Send :class:`Begin` to all agents, and wait until they are ready; raises as :meth:`connect`."""
        for agency, count in zip(self.agencies, ranks, strict=True):
            agency.tell(Begin(directory, dict(environment), count, bind))
        self._wait(lambda agency: agency.is_ready, "was not ready")

    def _wait(self, done: Callable[[AgentClient], bool], what: str) -> None:
        end = time.monotonic() + _START
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ, lambda: None)
            try:
                for agency in self.agencies:
                    agency.watch(selector)
                while not all(map(done, self.agencies)):
                    moments = [end, *(agency.next_at() for agency in self.agencies)]
                    for key, _ in selector.select(max(0.0, min(moments) - time.monotonic())):
                        key.data()
                    self._look(done, end, what)
            finally:
                for agency in self.agencies:
                    agency.leave()

    def _look(self, done: Callable[[AgentClient], bool], end: float, what: str) -> None:
        for number in self._signals.read():
            if number in STOP:
                raise Stopped(number)
        now = time.monotonic()
        for agency in self.agencies:
            agency.tick(now)
            if now >= end and not done(agency):
                agency.lose(f"its agent {what} in {_START:.0f} s")
            if agency.trouble:
                raise LaunchError(failure(agency))

    def close(self) -> None:
        """End all agents."""
        end = time.monotonic() + _END
        for agency in self.agencies:
            agency.hang_up()
        for agency in self.agencies:
            agency.close(max(0.0, end - time.monotonic()))

    # -- addresses -----------------------------------------------------------------------------

    def towards_hosts(self) -> list[str]:
        """The address of this machine for each host.

        It is ``SHOAL_INTERFACE``, or the source of the host's ssh connection, or the address on the route to
        the host.  This machine, as a host, uses the address for another host, because its ranks listen there.

        Raises:
            LaunchError: no address was found.
        """
        found = [None if agency.host.is_local else self._towards(agency) for agency in self.agencies]
        default = next((each for each in found if each is not None), LOOPBACK)
        return [each or default for each in found]

    def master(self) -> str:
        """The address of the first host for the other hosts."""
        first = self.agencies[0]
        assert first.hello is not None
        if first.host.is_local:
            return self.towards_hosts()[0]
        return first.hello.address or _bare(first.host)

    def _towards(self, agency: AgentClient) -> str:
        assert agency.hello is not None
        configured = config.INTERFACE.get()
        told = agency.hello.launcher
        with suppress(OSError, UnicodeError):
            if configured is not None:
                return str(socket.getaddrinfo(configured, 0, type=socket.SOCK_STREAM)[0][4][0])
            if told and is_mine(told):
                return told
            name = agency.hello.address or _bare(agency.host)
            return address_towards(str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]))
        if configured is not None:
            raise LaunchError(f"SHOAL_INTERFACE={configured!r} is not an address of this machine")
        raise LaunchError(
            f"host {agency.host.name}: found no address of this machine that it can reach; set "
            "SHOAL_INTERFACE"
        )


def failure(agency: AgentClient) -> str:
    """Why a host could not be used, with the last lines of its output."""
    noise = bytes(agency.noise).decode(errors="replace").splitlines()[-5:]
    said = [*map(printable, noise), *agency.client.said]
    lines = "".join(f"\n  | {line}" for line in said)
    return f"host {agency.host.name}: {agency.trouble}" + (f"\nits output:{lines}" if lines else "")


def _bare(host: Host) -> str:
    """The name of a host without user and without the brackets of an IPv6 address."""
    return host.name.rpartition("@")[2].strip("[]")
