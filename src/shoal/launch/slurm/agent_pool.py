"""The agents of the nodes of an allocation: srun starts them, and they connect to the launcher."""

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
from ...common.formatting import printable
from ...errors import LaunchError, WireError, WireTimeout
from ...net import Acceptor, Connection, listen
from ...rendezvous.launcher_variables import tcp_url
from ...rendezvous.slurm_nodelist import hosts_of
from ..job.signals import Signals
from ..remote.agent_client import AgentClient
from ..remote.agent_pool import START_TIMEOUT_S, AgentPool
from ..remote.callback import PURPOSE, NodeHello
from ..remote.hosts import Host
from .srun import Srun, SrunConnection, command, environment

#: seconds between two polls for new connections
_POLL_INTERVAL_S = 0.02
#: timeout in seconds for an authenticated agent to send its node name
_NODE_NAME_TIMEOUT_S = 10.0
#: maximum number of hosts in a message
_MAX_NAMES_SHOWN = 8
#: srun's message on a task that has ended
_TASK_EXIT = re.compile(r"srun: error: ([^ :]+): tasks? [0-9,\[\]-]+: (.+)")
_FROM_ANYWHERE = "0.0.0.0"


class SrunAgentPool(AgentPool):
    """The agents of the nodes of an allocation; ``hidden``: variables that are not passed to them."""

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
        """Wait until all agents have connected and sent Hello; raises as :meth:`AgentPool.connect`."""
        end = time.monotonic() + START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ, lambda: None)
            self._srun.watch(selector)
            try:
                while len(self.agents) < len(self._hosts):
                    for key, _ in selector.select(_POLL_INTERVAL_S):
                        key.data()
                    self._accept(selector)
                    self._check(lambda agent: True, end, "")
                    self._check_missing(time.monotonic() >= end)
            finally:
                for agent in self.agents:
                    agent.unwatch()
                self._srun.watch(None)
        self.agents.sort(key=lambda agent: agent.host.first)
        super().connect()

    def close(self) -> None:
        super().close()
        self._steps.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        while True:
            try:
                connection = self._acceptor.accept(0.0)
            except WireTimeout:
                return
            except WireError as error:
                raise LaunchError(f"cannot accept connections of agents: {error}") from error
            try:
                host = self._host_of(connection)
                self.agents.append(AgentClient(host, SrunConnection(connection, self._srun)))
                self.agents[-1].watch(selector)
            except WireError as error:
                connection.close()
                self._refused = str(error)
            except LaunchError:
                connection.close()
                raise

    def _host_of(self, connection: Connection) -> Host:
        """The host of the agent at the other end of ``connection``.

        Raises:
            WireError: the agent did not send its node name, or no agent is missing.
            LaunchError: no agent is missing on its node.  It has the secret of this start, so it is one of
                its agents, and a missing agent will never connect.
        """
        try:
            name = from_msgpack(connection.recv(_NODE_NAME_TIMEOUT_S), NodeHello).host
        except MalformedMessage as error:
            raise WireError(f"it did not send its node name: {error}") from error
        missing = self._missing()
        for host in missing:
            if host.name == name:
                return host
        if not missing:
            raise WireError("all agents have connected already")
        known = any(host.name == name for host in self._hosts)
        why = "one has connected from there already" if known else "the job has no ranks there"
        raise self._failed(
            missing, f"no agent has connected from there; one reports node {printable(name)}, but {why}"
        )

    def _missing(self) -> list[Host]:
        there = {agent.host.name for agent in self.agents}
        return [host for host in self._hosts if host.name not in there]

    def _check_missing(self, is_late: bool) -> None:
        missing = self._missing()
        if not missing:
            return
        if (code := self._srun.code) is not None:
            why = f"srun ended with exit code {code} before an agent had connected from there"
        elif ended := self._ended_there(missing):
            missing, why = [ended[0][0]], f"its agent ended before it had connected: {ended[0][1]}"
        elif is_late:
            interface, port = self._where.rsplit(":", 1)
            where = self._where if interface else f"port {port} of this machine"
            why = f"its agent has not connected in {START_TIMEOUT_S:.0f} s"
            why += f"; agents connect to {where}; set SHOAL_INTERFACE for another address"
        else:
            return
        if refused := self._refused or self._acceptor.refused:
            why += f"; the last connection was refused: {printable(refused)}"
        raise self._failed(missing, why)

    def _failed(self, missing: Sequence[Host], why: str) -> LaunchError:
        self._srun.stderr_tail.read()
        lines = "".join(f"\n  | {line}" for line in self._srun.stderr_tail.lines)
        return LaunchError(f"{_named(missing)}: {why}" + (f"\noutput of srun:{lines}" if lines else ""))

    def _ended_there(self, missing: Sequence[Host]) -> list[tuple[Host, str]]:
        """Hosts with agents that have ended, according to the output of srun, and how; avoids the timeout."""
        found = []
        for line in self._srun.stderr_tail.lines:
            if match := _TASK_EXIT.fullmatch(line):
                try:
                    names = hosts_of(match[1])
                except ValueError:
                    continue
                found += [(host, match[2]) for host in missing if host.name in names]
        return found


def _named(hosts: Sequence[Host]) -> str:
    names = ", ".join(host.name for host in hosts[:_MAX_NAMES_SHOWN])
    more = f" and {len(hosts) - _MAX_NAMES_SHOWN} more" if len(hosts) > _MAX_NAMES_SHOWN else ""
    return ("host " if len(hosts) == 1 else "hosts ") + names + more
