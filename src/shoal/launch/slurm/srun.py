"""The srun process, which starts an agent on each node of a Slurm allocation, and ends with them."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from ... import config
from ...errors import LaunchError, UsageError
from ...net import Connection
from ..output.causes import shell_code
from ..ranks.source import StderrTail
from ..remote.connection import StreamCarrier
from ..remote.hosts import Host
from .allocation import for_srun

#: seconds for srun to exit after its agents, and then after SIGTERM
_EXIT_TIMEOUTS_S = (3.0, 2.0)

#: one agent per node, with all resources of the job there, shared with other steps and without binding; an
#: agent is not ended when another one ends
_OPTIONS = (
    "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none",
    "--mpi=none", "--input=none", "--export=ALL", "--chdir=/", "--job-name=shoal-agent",
)  # fmt: skip


def command(hosts: Sequence[Host], python: str, where: str) -> list[str]:
    """The command that starts the agents of ``hosts``, which connect to ``where``; without secrets."""
    names = ",".join(host.name for host in hosts)
    nodes = [f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", f"--nodelist={names}"]
    return ["srun", *nodes, *_OPTIONS, python, "-m", "shoal", "agent", "--connect", where]


def environment(environ: Mapping[str, str], hidden: Collection[str], secret: str) -> dict[str, str]:
    """The environment of srun and the agents: ``environ`` without ``hidden``, and with ``secret``."""
    found = {k: v for k, v in for_srun(environ).items() if k not in hidden}
    if paths := found.get("PYTHONPATH"):  # agents start in another directory
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return {**found, config.SECRET.name: secret}


class Srun:
    """The srun process, which runs as long as its agents do."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        program = shutil.which(argv[0])
        if program is None:
            raise UsageError("--srun: srun was not found on PATH: run it on a machine with Slurm")
        try:
            self._process = subprocess.Popen(
                [program, *argv[1:]],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # only the launcher must get Ctrl-C at the terminal
            )
        except OSError as error:
            raise LaunchError(f"srun could not be started: {error.strerror or error}") from error
        self._pidfd = os.pidfd_open(self._process.pid)
        assert self._process.stderr is not None
        self.stderr_tail = StderrTail(self._process.stderr)
        self._selector: selectors.BaseSelector | None = None
        self._connections: set[SrunConnection] = set()

    @property
    def code(self) -> int | None:
        """Its exit code, as a shell gives it; None while it runs."""
        code = self._process.poll()
        return None if code is None else shell_code(code)

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        """Handle events in the loop of ``selector``, which calls the data of ready keys; None: in no loop."""
        if selector is self._selector:
            return
        if self._selector is not None:
            self.stderr_tail.watch(None)
            if self._pidfd in self._selector.get_map():
                self._selector.unregister(self._pidfd)
        self._selector = selector
        if selector is not None:
            self.stderr_tail.watch(selector)
            selector.register(self._pidfd, selectors.EVENT_READ, self._ended)

    def use(self, connection: SrunConnection, selector: selectors.BaseSelector | None) -> None:
        """Shut ``connection`` down when srun ends, in the loop of ``selector``; None: it is not used now."""
        if selector is not None:
            self._connections.add(connection)
            self.watch(selector)
        else:
            self._connections.discard(connection)
            if not self._connections:
                self.watch(None)

    def end(self) -> None:
        """Wait for srun to exit, after all connections are closed; then send SIGTERM, then SIGKILL."""
        self.watch(None)
        for seconds, then in zip(
            _EXIT_TIMEOUTS_S, (self._process.terminate, self._process.kill), strict=True
        ):
            try:
                self._process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                then()
        self._process.wait()
        self.stderr_tail.close()
        os.close(self._pidfd)

    def _ended(self) -> None:
        if self._selector is None:
            return  # the last connection ended in the same turn of the loop
        self._selector.unregister(self._pidfd)
        self.stderr_tail.read()
        # Without srun, Slurm would not end the agents any more.
        for connection in list(self._connections):
            connection.shut_down()


class SrunConnection:
    """The connection of an agent that srun has started; see :class:`SshProcess`."""

    name = "srun"

    def __init__(self, connection: Connection, srun: Srun) -> None:
        self._stream = connection.release()
        self._srun = srun
        self.carrier = StreamCarrier(self._stream)

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        """Read stderr of srun, once for all connections, in the loop of ``selector``; None: in no loop."""
        self._srun.use(self, selector)

    def shut_down(self) -> None:
        """Shut down the connection without closing it."""
        with suppress(OSError):  # it has ended
            self._stream.shutdown()

    @property
    def stderr_tail(self) -> list[str]:
        self._srun.stderr_tail.read()
        return self._srun.stderr_tail.lines

    def end(self, timeout: float) -> int | None:
        """Stop to use srun, which serves the other agents; return its exit code if it has ended."""
        self._srun.use(self, None)
        return self._srun.code
