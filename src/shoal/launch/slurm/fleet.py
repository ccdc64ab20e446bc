"""The agents of an allocation's nodes: srun starts them, and they call back."""

from __future__ import annotations

import os
import re
import secrets
import selectors
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from ... import config
from ...common.decoding import MalformedMessage, from_msgpack
from ...common.wording import printable
from ...errors import LaunchError, WireError, WireTimeout
from ...net import Acceptor, Connection, listen
from ...rendezvous.environment import tcp_url
from ...rendezvous.slurm import hosts_of
from ..job.signals import Signals
from ..remote.agency import AgentClient
from ..remote.dial import PURPOSE, NodeHello
from ..remote.fleet import Fleet
from ..remote.hosts import Host
from .srun import AgentCall, Srun, command, environment

#: seconds in which every agent must have called; Python starts from network disks in that time
_START = 60.0
#: seconds between two looks for an agent that calls
_LOOK = 0.02
#: seconds in which an agent that has proved itself says which node it is on
_FIRST_WORD = 10.0
#: hosts that a message names
_SHOWN = 8
#: srun's words on a task that has ended
_ENDED = re.compile(r"srun: error: ([^ :]+): tasks? [0-9,\[\]-]+: (.+)")
_FROM_ANYWHERE = "0.0.0.0"


class SrunFleet(Fleet):
    """The agents of an allocation's nodes.

    Args:
        hosts: the nodes that have ranks, or may have some.
        python: the interpreter that runs the agents.
        signals: one that ends the launcher ends the start.
        hidden: variables of this process that agents do not find.
    """

    def __init__(
        self, hosts: Sequence[Host], python: str, signals: Signals, *, hidden: Collection[str]
    ) -> None:
        self._hidden = hidden
        self._steps = ExitStack()
        self._refused = ""
        super().__init__(hosts, python, signals)

    def _start(self, python: str) -> None:
        secret = secrets.token_hex(32)
        interface = config.INTERFACE.get()
        listener = listen(interface or _FROM_ANYWHERE, secret=secret.encode())
        port = listener.getsockname()[1]
        self._where = tcp_url(interface or "", port).removeprefix("tcp://")
        self._acceptor = self._steps.enter_context(
            Acceptor(listener, secret=secret.encode(), purpose=PURPOSE, most_pending=len(self._hosts) + 64)
        )
        self._srun = Srun(
            command(self._hosts, python, self._where), environment(os.environ, self._hidden, secret)
        )
        self._steps.callback(self._srun.end)

    def connect(self) -> None:
        """Wait until all agents have called and answered; raises as the base does."""
        end = time.monotonic() + _START
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ, lambda: None)
            self._srun.watch(selector)
            try:
                while len(self.agencies) < len(self._hosts):
                    for key, _ in selector.select(_LOOK):
                        key.data()
                    self._take(selector)
                    self._look(lambda agency: True, end, "")
                    self._judge(time.monotonic() >= end)
            finally:
                for agency in self.agencies:
                    agency.leave()
                self._srun.watch(None)
        self.agencies.sort(key=lambda agency: agency.host.first)
        super().connect()

    def close(self) -> None:
        """End all agents, and srun."""
        super().close()
        self._steps.close()

    def _take(self, selector: selectors.BaseSelector) -> None:
        """Take in the agents that have called."""
        while True:
            try:
                connection = self._acceptor.accept(0.0)
            except WireTimeout:
                return
            except WireError as error:
                raise LaunchError(f"no agent can be heard: {error}") from error
            try:
                host = self._host_of(connection)
                self.agencies.append(AgentClient(host, AgentCall(connection, self._srun)))
                self.agencies[-1].watch(selector)
            except WireError as error:
                connection.close()
                self._refused = str(error)
            except LaunchError:
                connection.close()
                raise

    def _host_of(self, connection: Connection) -> Host:
        """Where the agent at the other end runs.

        Raises:
            WireError: it does not say so, or no agent is missing anywhere.
            LaunchError: no agent is missing there.  It has the secret of this start, so it is one of its
                agents, and one of those that are missing will not call.
        """
        try:
            name = from_msgpack(connection.recv(_FIRST_WORD), NodeHello).host
        except MalformedMessage as error:
            raise WireError(f"it did not say where it is: {error}") from error
        missing = self._missing()
        for host in missing:
            if host.name == name:
                return host
        if not missing:
            raise WireError("no agent is missing")
        known = any(host.name == name for host in self._hosts)
        why = "one has called from there already" if known else "the job has no ranks there"
        raise self._failed(
            missing, f"no agent has called from there; one says that it is on {printable(name)}, but {why}"
        )

    def _missing(self) -> list[Host]:
        there = {agency.host.name for agency in self.agencies}
        return [host for host in self._hosts if host.name not in there]

    def _judge(self, is_late: bool) -> None:
        """Raise if agents are missing that will not call any more."""
        missing = self._missing()
        if not missing:
            return
        if (code := self._srun.code) is not None:
            why = f"srun ended with exit code {code} before an agent had called from there"
        elif ended := self._ended_there(missing):
            missing, why = [ended[0][0]], f"its agent ended before it had called back: {ended[0][1]}"
        elif is_late:
            interface, port = self._where.rsplit(":", 1)
            where = self._where if interface else f"port {port} of this machine"
            why = f"its agent has not called back in {_START:.0f} s"
            why += f"; agents call {where}, and SHOAL_INTERFACE names another address"
        else:
            return
        if refused := self._refused or self._acceptor.refused:
            why += f"; the last that called was refused: {printable(refused)}"
        raise self._failed(missing, why)

    def _failed(self, missing: Sequence[Host], why: str) -> LaunchError:
        self._srun.said.hear()
        said = "".join(f"\n  | {line}" for line in self._srun.said.lines)
        return LaunchError(f"{_named(missing)}: {why}" + (f"\nsrun said:{said}" if said else ""))

    def _ended_there(self, missing: Sequence[Host]) -> list[tuple[Host, str]]:
        """Hosts whose agents have ended, by srun's words: without them the wait for these would be long."""
        found = []
        for line in self._srun.said.lines:
            if match := _ENDED.fullmatch(line):
                try:
                    names = hosts_of(match[1])
                except ValueError:
                    continue
                found += [(host, match[2]) for host in missing if host.name in names]
        return found


def _named(hosts: Sequence[Host]) -> str:
    names = ", ".join(host.name for host in hosts[:_SHOWN])
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return ("host " if len(hosts) == 1 else "hosts ") + names + more
