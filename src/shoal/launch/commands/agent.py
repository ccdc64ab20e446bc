"""``shoal agent``: starts processes on a host for a launcher on another host.

The launcher requests processes and signals; the agent sends back output, reports and exit codes.  When its
connection ends, or no frame has come from the launcher for ``SILENCE_TIMEOUT_S`` seconds, the agent kills all
processes that it started, and exits.  If the agent is killed, its guardian kills them.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial

import click

from ...errors import LaunchError, UsageError, WireError
from ...net import build_version
from .. import agent_protocol as frames
from ..agent_protocol import OUTPUT_WINDOW_BYTES, PREAMBLE, PROTOCOL, SILENCE_TIMEOUT_S, STDERR, STDOUT
from ..output.stdin import StdinPipe
from ..ranks.environment import INITIAL_RANK_VARIABLES, ReservedPort, divide_cores, usable_cores
from ..ranks.fork_server import ForkServer
from ..ranks.guardian import Guardian
from ..ranks.process import GroupCleanup, LocalRank
from ..ranks.source import OutputSource
from ..remote.callback import StepSignalFilter, addresses_of, connect_to_launcher, remove_variables
from ..remote.connection import AgentConnection, Carrier, DescriptorCarrier, StreamCarrier
from ..slurm.allocation import AGENT_TASK_VARIABLES

_POLL_INTERVAL_S = 0.02
#: seconds for the launcher to read the last frames
_BYE_TIMEOUT_S = 5.0
#: maximum length of a text in a frame
_MAX_ERROR_CHARACTERS = 2000


class AgentServer:
    """A server of processes for one launcher, until its connection ends.

    Args:
        port: a port that this process keeps free on its host.
        ends: the addresses of the launcher's host and of this host; "" if unknown.
        already_sent: returns whether the processes already got a signal from elsewhere (Slurm).
    """

    def __init__(
        self,
        carrier: Carrier,
        guardian: Guardian,
        port: int,
        ends: tuple[str, str],
        already_sent: Callable[[int], bool],
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._guardian = guardian
        self._begin: frames.Begin | None = None
        self._fork_server: ForkServer | None = None
        self._ranks: dict[int, LocalRank] = {}
        self._last_frame_at = time.monotonic()
        self._is_suspended = False
        self._why = ""
        self._ended = False
        self._sweep: GroupCleanup | None = None
        #: the sources of output (also those that are paused by the window) -> index of the process, stream
        self._sources: dict[OutputSource, tuple[int, int]] = {}
        self._unread = 0
        self._stdin = StdinPipe(self._selector, lambda amount: self._link.send(frames.StdinTaken(amount)))
        self._link: AgentConnection[frames.FromLauncher] = AgentConnection(
            carrier, frames.decode_from_launcher, self._received, self._lost
        )
        self._link.watch(self._selector)
        self._link.write(PREAMBLE)
        self._already_sent = already_sent
        self._link.send(frames.Hello(build_version(), PROTOCOL, launcher=ends[0], address=ends[1], port=port))

    def run(self) -> str:
        """Serve; return why the connection was lost, or "" if the launcher ended the job."""
        while not self._why:
            timeout = _POLL_INTERVAL_S if self._sweep is not None else self._silent_at - time.monotonic()
            for key, _ in self._selector.select(min(max(0.0, timeout), SILENCE_TIMEOUT_S)):
                key.data()
            if time.monotonic() >= self._silent_at:
                self._why = f"nothing has come from the launcher for {SILENCE_TIMEOUT_S:.0f} s"
            elif self._sweep is not None and self._sweep.is_done() and self._drain():
                return self._leave(self._sweep.killed)
        return self._why

    @property
    def _silent_at(self) -> float:
        """The time at which a silent launcher counts as lost."""
        return math.inf if self._is_suspended else self._last_frame_at + SILENCE_TIMEOUT_S

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.send_group(signal.SIGKILL)
        for rank in self._ranks.values():
            rank.reap()
        if self._fork_server is not None:
            self._fork_server.close()
        self._stdin.close()
        self._link.close()
        self._selector.close()

    # -- frames --------------------------------------------------------------------------------

    def _lost(self, why: str) -> None:
        self._why = why

    def _received(self, frame: frames.FromLauncher) -> None:
        self._last_frame_at = time.monotonic()
        self._is_suspended = isinstance(frame, frames.Suspend)
        match frame:
            case frames.Beat():
                self._link.send(frames.Beat(frame.launcher, time.monotonic()))
            case frames.Begin():
                self._prepare(frame)
            case frames.Start():
                self._start(frame)
            case frames.Taken():
                if frame.amount > self._unread:
                    raise WireError("it acknowledged more output than was sent")
                was_full = self._unread >= OUTPUT_WINDOW_BYTES
                self._unread -= frame.amount
                if was_full:
                    self._listen()
            case frames.Close():
                self._close(frame)
            case frames.Signal():
                self._signal(frame)
            case frames.StdinData():
                self._stdin.take(frame.data)
            case frames.Release():
                self._release(frame.index)
            case frames.End():
                self._sweep = GroupCleanup(list(self._ranks.values()), frame.linger)

    def _prepare(self, begin: frames.Begin) -> None:
        if self._begin is not None:
            raise WireError("it sent Begin twice")
        try:
            os.chdir(begin.directory)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._send_ready(f"the directory {begin.directory} cannot be entered: {reason}")
            return
        self._begin = begin
        if (preload := begin.preload) is None:
            self._send_ready()
            return
        try:
            self._fork_server = ForkServer(preload.argv, preload.modules, self._environment(begin, {}))
        except LaunchError as error:
            self._send_ready(str(error))
            return
        self._selector.register(self._fork_server, selectors.EVENT_READ, self._preloaded)

    def _preloaded(self) -> None:
        assert self._fork_server is not None
        self._selector.unregister(self._fork_server)
        try:
            self._fork_server.wait_ready()
        except LaunchError as error:
            self._send_ready(str(error))
        else:
            self._send_ready()

    def _send_ready(self, error: str = "") -> None:
        self._link.send(frames.Ready(error[:_MAX_ERROR_CHARACTERS]))

    def _start(self, start: frames.Start) -> None:
        if self._begin is None or start.index in self._ranks or self._sweep is not None:
            raise WireError(f"process {start.index} cannot be started now")
        cores = None
        if self._begin.bind:
            dealt = divide_cores(usable_cores(), max(1, self._begin.ranks))
            cores = dealt[start.place % len(dealt)]
        try:
            rank = LocalRank(
                start.index, start.slot, start.restart, start.size, start.argv,
                self._environment(self._begin, start.variables),
                guardian=self._guardian, cores=cores, fork_server=self._fork_server,
                stdin=subprocess.PIPE if start.stdin else subprocess.DEVNULL,
                threaded=False, newcomer=start.newcomer,
            )  # fmt: skip
        except (LaunchError, UsageError) as error:
            self._link.send(frames.Started(start.index, None, str(error)[:_MAX_ERROR_CHARACTERS]))
            return
        self._ranks[start.index] = rank
        if start.stdin:
            self._stdin.attach(rank.take_stdin())
        rank.watch(self._selector, lambda: self._exited(rank), lambda: self._reported(rank))
        for stream, source in ((STDOUT, rank.stdout), (STDERR, rank.stderr)):
            self._sources[source] = (start.index, stream)
        self._link.send(frames.Started(start.index, rank.pid))
        self._listen()

    def _environment(self, begin: frames.Begin, variables: Mapping[str, str]) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if k not in INITIAL_RANK_VARIABLES}
        if "OMP_NUM_THREADS" not in begin.environment:
            found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // max(1, begin.ranks)))
        return {**found, **begin.environment, **variables}

    def _signal(self, frame: frames.Signal) -> None:
        rank = self._ranks.get(frame.index)
        if rank is None or rank.is_released:
            return  # released or never started; the launcher did not know yet
        if frame.group:
            rank.send_group(frame.number)
        elif rank.status is None and not self._already_sent(frame.number):
            rank.send(frame.number)

    def _close(self, frame: frames.Close) -> None:
        rank = self._ranks.get(frame.index)
        if rank is not None:  # None: it was never started
            source = rank.stdout if frame.stream == STDOUT else rank.stderr
            self._sources.pop(source, None)
            source.close()

    def _release(self, index: int) -> None:
        rank = self._ranks.get(index)
        if rank is None:
            return  # it was never started
        if rank.status is None:
            raise WireError(f"process {rank.index} has not ended and cannot be released")
        if not rank.is_released:
            rank.send_group(signal.SIGKILL)
            self._guardian.forget(rank.pid)
            rank.release()

    # -- events of processes -------------------------------------------------------------------

    def _reported(self, rank: LocalRank) -> None:
        reports, notices = tuple(rank.sent_reports), tuple(rank.take_notices())
        self._link.send(frames.Reported(rank.index, rank.joined, reports, notices, rank.rebuilds))

    def _exited(self, rank: LocalRank) -> None:
        assert rank.status is not None
        self._link.send(frames.Exited(rank.index, rank.status, at=rank.ended_at, seconds=rank.seconds))

    # -- output --------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Read from the pipes of the processes, unless the launcher has to read a full window first."""
        full = self._unread >= OUTPUT_WINDOW_BYTES
        for source in self._sources:
            source.ignore()
            if not full:
                source.listen(self._selector, partial(self._read, source))

    def _read(self, source: OutputSource) -> bool:
        """Read a chunk and send it; return whether there was one."""
        if source not in self._sources or self._unread >= OUTPUT_WINDOW_BYTES:
            return False
        try:
            data = source.read()
        except BlockingIOError:
            return False
        self._pass_on(source, data)
        return bool(data)

    def _pass_on(self, source: OutputSource, data: bytes) -> None:
        """Send ``data`` of a source; ``b""`` is its end."""
        index, stream = self._sources[source]
        self._link.send(frames.ProcessOutput(index, stream, data), bulk=True)
        self._unread += len(data)
        if not data:
            del self._sources[source]
            source.close()
        if self._unread >= OUTPUT_WINDOW_BYTES:
            self._listen()

    def _drain(self) -> bool:
        """Send the rest of the output, even of pipes that others hold open; return whether all is sent."""
        for source in list(self._sources):
            while source in self._sources and self._unread < OUTPUT_WINDOW_BYTES and self._read(source):
                pass
            if source in self._sources and self._unread < OUTPUT_WINDOW_BYTES:
                self._pass_on(source, b"")
        return not self._sources

    def _leave(self, killed: list[str]) -> str:
        self._link.send(frames.Bye(tuple(name[:300] for name in killed[:1000])), bulk=True)
        end = 0.0
        while not self._why:  # the launcher closes the connection
            now = time.monotonic()
            if self._link.sent:
                end = end or now + _BYE_TIMEOUT_S
                if now >= end:
                    break
            elif now >= self._silent_at:
                return f"nothing has come from the launcher for {SILENCE_TIMEOUT_S:.0f} s"
            for key, _ in self._selector.select(min((end or self._silent_at) - now, SILENCE_TIMEOUT_S)):
                key.data()
        return "" if self._link.sent else self._why


def serve(carrier: Carrier, ends: tuple[str, str], already_sent: Callable[[int], bool]) -> int:
    """Serve the launcher at the other end of ``carrier``; return the exit code.  See :class:`AgentServer`."""
    with ExitStack() as steps:
        port = steps.enter_context(closing(ReservedPort("")))
        guardian = steps.enter_context(Guardian())
        server = AgentServer(carrier, guardian, port.number, ends, already_sent)
        why = steps.enter_context(closing(server)).run()
    if why:
        print(f"shoal agent: {why}; all its processes were killed", file=sys.stderr, flush=True)
    return 1 if why else 0


def _ends_of_ssh() -> tuple[str, str]:
    client, _, server = os.environ.get("SSH_CONNECTION", "").partition(" ")
    return client, server.split(" ")[1] if " " in server else ""


def _serve_connected(where: str) -> int:
    with StepSignalFilter() as already_sent, connect_to_launcher(where, os.environ) as connection:
        remove_variables(AGENT_TASK_VARIABLES)
        ends = addresses_of(connection)
        return serve(StreamCarrier(connection.release()), ends, already_sent)


@click.command(hidden=True)
@click.option("--stdio", is_flag=True, help="Communicate with the launcher over stdin and stdout.")
@click.option("--connect", metavar="HOST:PORT", help="Connect to the launcher at this address.")
def agent(stdio: bool, connect: str | None) -> int:
    """Start processes for shoal run on another host. This command is started by shoal run."""
    if stdio == (connect is not None):
        raise click.UsageError("shoal agent is started by shoal run --hosts and --srun")
    # Frames have their own descriptors: anything printed to stdout must not get between them.
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    if connect is not None:
        os.close(reading)
        os.close(writing)
        return _serve_connected(connect)
    return serve(DescriptorCarrier(reading, writing), _ends_of_ssh(), lambda number: False)
