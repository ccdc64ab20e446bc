"""srun, the program of Slurm that starts an agent on each node of an allocation, and ends with them."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from ... import config
from ...errors import LaunchError, UsageError
from ...net import Connection
from ..remote.hosts import Host
from ..remote.link import OfStream
from ..remote.said import Said
from .allocation import for_srun

#: seconds that srun has to end when its agents have, and then when it was asked to
_END = (3.0, 2.0)

#: one agent a node, with all that the job has there: not bound, not in the way of other steps, and neither
#: ended because another one was
_OPTIONS = (
    "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none",
    "--mpi=none", "--input=none", "--export=ALL", "--chdir=/", "--job-name=shoal-agent",
)  # fmt: skip


def command(hosts: Sequence[Host], python: str, where: str) -> list[str]:
    """What starts the agents of ``hosts``; nothing secret is in it.

    Args:
        where: they call, as ``shoal agent --connect`` takes it.
    """
    names = ",".join(host.name for host in hosts)
    nodes = [f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", f"--nodelist={names}"]
    return ["srun", *nodes, *_OPTIONS, python, "-m", "shoal", "agent", "--connect", where]


def environment(environ: Mapping[str, str], hidden: Collection[str], secret: str) -> dict[str, str]:
    """What srun finds, and passes on to the agents.

    Args:
        environ: this process's.
        hidden: variables that mean something to this process alone.
        secret: what agents prove that they have.
    """
    found = {k: v for k, v in for_srun(environ).items() if k not in hidden}
    if paths := found.get("PYTHONPATH"):  # agents start in another directory
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return {**found, config.SECRET.name: secret}


class Srun:
    """The process, which lives as long as its agents do."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        program = shutil.which(argv[0])
        if program is None:
            raise UsageError("--srun: there is no program srun on PATH: this machine is none of Slurm's")
        try:
            self._process = subprocess.Popen(
                [program, *argv[1:]],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # what Ctrl-C at the terminal means is the launcher's business
            )
        except OSError as error:
            raise LaunchError(f"srun could not be started: {error.strerror or error}") from error
        self._pidfd = os.pidfd_open(self._process.pid)
        assert self._process.stderr is not None
        self.said = Said(self._process.stderr)
        self._selector: selectors.BaseSelector | None = None
        self._calls: set[AgentCall] = set()
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code as a shell says it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        """Work in the loop of ``selector``, whose data are functions to call; None: in none."""
        if selector is self._selector:
            return
        if self._selector is not None:
            self.said.pipe.ignore()
            if self._pidfd in self._selector.get_map():
                self._selector.unregister(self._pidfd)
        self._selector = selector
        if selector is not None:
            self.said.pipe.listen(selector, self.said.hear)
            selector.register(self._pidfd, selectors.EVENT_READ, self._ended)

    def join(self, call: AgentCall, selector: selectors.BaseSelector) -> None:
        """An agent's connection is in use in the loop of ``selector``: it ends when srun does."""
        self._calls.add(call)
        self.watch(selector)

    def part(self, call: AgentCall) -> None:
        """It is no more."""
        self._calls.discard(call)
        if not self._calls:
            self.watch(None)

    def end(self) -> None:
        """Wait for its end, now that no agent has a connection any more; asks it to end, then kills it."""
        self.watch(None)
        for seconds, then in zip(_END, (self._process.terminate, self._process.kill), strict=True):
            try:
                self._process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                then()
        self._process.wait()
        self.said.close()
        os.close(self._pidfd)

    def _ended(self) -> None:
        if self._selector is None:
            return  # the last connection ended in the same moment
        self._selector.unregister(self._pidfd)
        self.said.hear()
        # Nobody would end the agents any more when Slurm should.
        for call in list(self._calls):
            call.cut()


class AgentCall:
    """The connection of an agent that has called: what leads to its host, as an agency sees it."""

    name = "srun"

    def __init__(self, connection: Connection, srun: Srun) -> None:
        self._stream = connection.release()
        self._srun = srun
        self.carrier = OfStream(self._stream)
        self.stderr = self

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None:
        """Hear srun's words in the loop of ``selector``."""
        self._srun.join(self, selector)

    def ignore(self) -> None:
        """Stop that."""
        self._srun.part(self)

    def hear(self) -> None:
        """srun's words are heard for all calls together."""

    def cut(self) -> None:
        """End the connection without closing it."""
        with suppress(OSError):  # it has ended
            self._stream.shutdown()

    @property
    def said(self) -> list[str]:
        """The last lines of srun's stderr."""
        self._srun.said.hear()
        return self._srun.said.lines

    def end(self, timeout: float) -> int | None:
        """srun is there for the others: its exit code if it has ended."""
        self._srun.part(self)
        return self._srun.code
