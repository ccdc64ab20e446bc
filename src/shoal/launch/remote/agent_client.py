"""The launcher's client of one agent: its connection, clock and processes."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from ...common.formatting import printable
from ...errors import WireError
from ...failure_report import Report
from ...net import build_version
from .. import agent_protocol as frames
from ..agent_protocol import (
    HEARTBEAT_INTERVAL_S,
    MAX_CHUNK_BYTES,
    OUTPUT_WINDOW_BYTES,
    PREAMBLE,
    PROTOCOL,
    SILENCE_TIMEOUT_S,
    STDERR,
    STDOUT,
)
from ..ranks.rank import LOST, JobProcess
from .connection import AgentConnection
from .hosts import Host
from .output_relay import OutputRelay

if TYPE_CHECKING:
    from ..slurm.srun import SrunConnection
    from .ssh import SshProcess

#: timeout in seconds for an agent to report the end of a killed process, or to send Bye
_REPLY_TIMEOUT_S = 10.0
#: bytes of output to consume before an acknowledgement is sent
_ACK_BYTES = 1 << 16
#: number of heartbeats used to estimate the agent's clock, and of those sent without a pause at first
_CLOCK_SAMPLES, _FIRST_SAMPLES = 16, 5
#: seconds to wait for ssh to exit after its connection has ended, at most once per heartbeat
_SSH_EXIT_TIMEOUT_S = 0.2

#: frames that come while processes run
_ABOUT_PROCESSES = frames.ProcessOutput, frames.Reported, frames.Exited, frames.StdinTaken, frames.Bye


@dataclass
class AgentCallbacks:
    """Callbacks for events of an agent.

    Attributes:
        lost: the agent is lost; called with its ranks that had not ended.
        not_started: a process could not be started; called with the reason.
        stdin_taken: rank 0 has consumed this number of bytes of stdin.
    """

    lost: Callable[[AgentClient, list[RemoteRank]], None]
    not_started: Callable[[RemoteRank, str], None]
    stdin_taken: Callable[[int], None]


class AgentClient:
    """The launcher's client of the agent of one host; ``transport``: the program that connects to it.

    Attributes:
        watcher: callbacks; may be set later.
        hello: the agent's first frame; None before it has come.
        is_ready: the agent has handled :class:`Begin`.
        failure: why the agent cannot be used any more; "" while it can.
        killed: the processes that the agent killed at the end; None before Bye has come.
    """

    #: time after which the loop may wait again for the exit of a program that connects to an agent
    _waits_at: ClassVar[float] = 0.0

    def __init__(self, host: Host, transport: SshProcess | SrunConnection) -> None:
        self.host = host
        self.transport = transport
        self.watcher: AgentCallbacks | None = None
        self.hello: frames.Hello | None = None
        self.is_ready = False
        self.failure = ""
        self.killed: tuple[str, ...] | None = None
        self.ranks: dict[int, RemoteRank] = {}
        self._pending: set[int] = set()
        self._last_frame_at = self._beat_at = time.monotonic()
        self._began = self._last_frame_at
        self._reply_due_at = math.inf
        #: the agent was asked to end; output has come since Bye was last due
        self._is_ending = self._output_came = False
        self._unread = self._unacknowledged = 0
        self._clock: deque[tuple[float, float]] = deque(maxlen=_CLOCK_SAMPLES)
        self._link: AgentConnection[frames.FromAgent] = AgentConnection(
            transport.carrier, frames.decode_from_agent, self._received, self.mark_lost, preamble=PREAMBLE
        )

    def watch(self, selector: selectors.BaseSelector) -> None:
        if not self.failure:
            self._link.watch(selector)
            self.transport.watch(selector)

    def send_frame(self, frame: frames.AgentFrame) -> None:
        """Send a frame to the agent, unless it is lost."""
        if not self.failure:
            self._link.send(frame)

    def add(self, rank: RemoteRank) -> None:
        """Add ``rank``, which the agent is asked to start."""
        self.ranks[rank.index] = rank
        self._pending.add(rank.index)

    @property
    def has_replied(self) -> bool:
        """Whether the agent has replied to all requests to start a process."""
        return self.is_ready and not self._pending

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.failure and self.killed is None

    @property
    def is_flushed(self) -> bool:
        """Whether all frames were sent, or the agent is lost."""
        return bool(self.failure) or self._link.closed or self._link.sent

    def flush(self) -> None:
        if not self.failure:
            self._link.poll()

    def resume(self) -> None:
        """Restart all timeouts, after this process was continued."""
        now = time.monotonic()
        if self._reply_due_at < math.inf:
            self._reply_due_at = now + _REPLY_TIMEOUT_S
        self._last_frame_at = self._beat_at = now

    def expect_bye(self, linger: float) -> None:
        """Start the timeout for Bye, after :class:`End` was sent."""
        self._is_ending = True
        self._reply_due_at = time.monotonic() + linger + _REPLY_TIMEOUT_S

    def next_at(self) -> float:
        if self.failure or self.killed is not None:
            return math.inf
        # Before Hello, the caller has a timeout of its own.
        silent_at = math.inf if self.hello is None else self._last_frame_at + SILENCE_TIMEOUT_S
        return min(self._beat_at, silent_at, self._reply_due_at)

    def tick(self, now: float) -> None:
        """Send a heartbeat if one is due, and check timeouts of the agent."""
        if self.failure or self.killed is not None:
            return
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_INTERVAL_S
            if self.hello is not None:
                self._link.send(frames.Beat(now))
        if self.hello is not None and now >= self._last_frame_at + SILENCE_TIMEOUT_S:
            # A frame may have come while this process was busy or stopped.
            self._link.poll()
        if self.failure or self.killed is not None:
            return
        if self.hello is not None and now >= self._last_frame_at + SILENCE_TIMEOUT_S:
            self.mark_lost(f"nothing has come from its agent for {SILENCE_TIMEOUT_S:.0f} s")
        elif now >= self._reply_due_at:
            # The agent waits while its output is not consumed, and Bye is late on a slow connection.
            if self._unread or (self._is_ending and self._output_came):
                self._reply_due_at, self._output_came = now + _REPLY_TIMEOUT_S, False
            else:
                self.mark_lost(
                    f"its agent has not ended its processes as requested for {_REPLY_TIMEOUT_S:.0f} s"
                )

    def mark_lost(self, why: str) -> None:
        """Treat the agent as lost, and close its connection; the agent then kills its processes."""
        if self.failure:
            return
        self.transport.watch(None)
        self._link.close()
        # If many agents are lost at once, the loop waits for one only: the others need heartbeats.
        now = time.monotonic()
        code = self.transport.end(_SSH_EXIT_TIMEOUT_S if now >= AgentClient._waits_at else 0.0)
        AgentClient._waits_at = now + HEARTBEAT_INTERVAL_S
        parts = [why]
        if code is not None:
            parts.append(f"{self.transport.name} ended with exit code {code}")
        self.failure = printable("; ".join(parts))
        gone = [rank for rank in self.ranks.values() if rank.mark_lost(self.failure)]
        self._pending.clear()
        if self.watcher is not None and self.killed is None:
            self.watcher.lost(self, gone)

    def unwatch(self) -> None:
        if not self.failure:
            self._link.watch(None)
            self.transport.watch(None)

    def disconnect(self) -> None:
        """Close the connection; the agent then exits."""
        if not self.failure:
            self.unwatch()
            self._link.close()

    def close(self, timeout: float) -> None:
        """End the program that connects to the agent, after :meth:`disconnect`."""
        if not self.failure:
            self.failure = "it was closed"
            self.transport.end(timeout)

    @property
    def noise(self) -> bytearray:
        """Output of the other host before the agent's preamble."""
        return self._link.noise

    # -- for its ranks -------------------------------------------------------------------------

    def consumed(self, amount: int) -> None:
        """Record that ``amount`` bytes of output were consumed; acknowledge them if they are enough."""
        self._unread -= amount
        self._unacknowledged += amount
        if self._unacknowledged >= _ACK_BYTES or not self._unread:
            amount, self._unacknowledged = self._unacknowledged, 0
            if amount and not self.failure:
                self._link.send(frames.Taken(amount))

    def to_local_time(self, moment: float) -> float:
        """Convert a time of the agent's clock to this process's clock.

        The reply to a heartbeat was sent between the heartbeat and the arrival of the reply.  The fastest of
        the last replies gives the offset to within half of its round-trip time.
        """
        return moment - min(self._clock)[1] if self._clock else time.monotonic()

    def expect_exit(self) -> None:
        """Start the timeout for the end of a process, after SIGKILL was sent."""
        if self._reply_due_at == math.inf:
            self._reply_due_at = time.monotonic() + _REPLY_TIMEOUT_S

    # -- frames --------------------------------------------------------------------------------

    def _received(self, frame: frames.FromAgent) -> None:
        self._last_frame_at = time.monotonic()
        if isinstance(frame, frames.Hello) != (self.hello is None):
            raise WireError("it must send Hello once, as its first frame")
        match frame:
            case frames.Hello():
                self.hello = frame
                if (frame.version, frame.protocol) != (build_version(), PROTOCOL):
                    raise WireError(
                        f"it runs shoal {frame.version} (agents' protocol {frame.protocol}), and this is "
                        f"shoal {build_version()} (protocol {PROTOCOL}): install the same version everywhere"
                    )
                self._link.send(frames.Beat(self._last_frame_at))
            case frames.Beat():
                self._set_clock(frame)
            case frames.Ready() if not self.is_ready:
                if frame.error:
                    raise WireError(frame.error)
                self.is_ready = True
            case frames.Started() if frame.index in self._pending:
                self._pending.remove(frame.index)
                rank = self.ranks[frame.index]
                if frame.pid is not None:
                    rank.pid = frame.pid
                elif self.watcher is not None:
                    self.watcher.not_started(rank, printable(frame.error))
                    rank.not_started()
            case _ if self.is_ready and isinstance(frame, _ABOUT_PROCESSES):
                self._handle(frame)
            case _:
                raise WireError(f"it sent an unexpected {type(frame).__name__}")

    def _handle(self, frame: frames.FromAgent) -> None:
        match frame:
            case frames.ProcessOutput():
                self._output_came = True
                self._unread += len(frame.data)
                if self._unread + self._unacknowledged > OUTPUT_WINDOW_BYTES + MAX_CHUNK_BYTES:
                    raise WireError("it sent more output than the window allows")
                self._rank(frame.index).wrote(frame)
            case frames.Reported():
                self._rank(frame.index).reported(frame)
            case frames.Exited():
                self._rank(frame.index).exited(frame)
                if not any(rank.status is None and rank.was_killed for rank in self.ranks.values()):
                    self._reply_due_at = math.inf
            case frames.StdinTaken():
                if self.watcher is not None:
                    self.watcher.stdin_taken(frame.amount)
            case frames.Bye():
                if any(rank.status is None for rank in self.ranks.values()):
                    raise WireError("it sent Bye while processes were running")
                self.killed = tuple(map(printable, frame.killed))

    def _rank(self, index: int) -> RemoteRank:
        if index not in self.ranks or index in self._pending:
            raise WireError(f"it sent a frame about process {index}, which it was not asked to start")
        return self.ranks[index]

    def _set_clock(self, beat: frames.Beat) -> None:
        now = time.monotonic()
        if not self._began <= beat.launcher <= now or not math.isfinite(beat.agent):
            raise WireError("it replied to a heartbeat that was not sent")
        self._clock.append((now - beat.launcher, beat.agent - (beat.launcher + now) / 2))
        if len(self._clock) < _FIRST_SAMPLES:
            self._link.send(frames.Beat(now))


class RemoteRank(JobProcess):
    """A process that an agent has started, or is about to start, in a job of ``size`` ranks."""

    def __init__(
        self,
        index: int,
        slot: int,
        restart: int,
        *,
        agent: AgentClient,
        relays: deque[OutputRelay],
        size: int,
        newcomer: bool,
    ) -> None:
        super().__init__(index, slot, restart, newcomer=newcomer, host=agent.host.name)
        self.agent = agent
        self._size = size
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._ended: Callable[[], None] | None = None
        self._reported: Callable[[], None] | None = None
        self._notices: tuple[Report, ...] = ()
        self.was_killed = False
        self._relays = {
            stream: OutputRelay(
                relays, agent.consumed, partial(self._send_frame, frames.Close(index, stream))
            )
            for stream in (STDOUT, STDERR)
        }
        self.stdout, self.stderr = self._relays.values()

    # -- frames of the agent -------------------------------------------------------------------

    def wrote(self, frame: frames.ProcessOutput) -> None:
        self._relays[frame.stream].feed(frame.data)

    def reported(self, frame: frames.Reported) -> None:
        """Handle reports of the process; raises WireError."""
        numbered = [each for each in (*frame.reports, *frame.notices) if not each.meeting]
        if any(rank >= self._size for report in numbered for rank in report.ranks):
            raise WireError("it sent reports that name unknown ranks")
        if self.status is None:
            self.sent_reports = tuple(
                msgspec.structs.replace(each, at=self._moment(each.at)) for each in frame.reports
            )
            self.joined |= frame.joined
            self.rebuilds = max(self.rebuilds, frame.rebuilds)
            self._notices += frame.notices
            if self._reported is not None:
                self._reported()

    def exited(self, frame: frames.Exited) -> None:
        """Handle the end of the process; raises WireError."""
        if self.status is not None:
            raise WireError(f"it reported that process {self.index} ended twice")
        longest = time.monotonic() - self._began + 1.0
        self._seconds = frame.seconds if 0.0 <= frame.seconds <= longest else None
        self._end(frame.status, self._moment(frame.at))

    def not_started(self) -> None:
        self.is_released = True
        if self.status is None:
            self._end(127, time.monotonic())
        for relay in self._relays.values():
            if not relay.ended:
                relay.feed(b"")

    def mark_lost(self, why: str) -> bool:
        """Handle the loss of the host; return whether the process had not ended before."""
        for relay in self._relays.values():
            if not relay.ended:
                relay.feed(b"")
        if self.status is not None:
            return False
        self.status, self.ended_at, self.lost = LOST, time.monotonic(), why
        return True

    def _end(self, status: int, at: float) -> None:
        self.status, self.ended_at = status, at
        if self._ended is not None:
            self._ended()

    def _moment(self, at: float) -> float:
        """Convert a time to this clock, clamped to the run time of the process; NaN becomes now."""
        here = self.agent.to_local_time(at)
        return min(max(here, self._began), time.monotonic()) if here == here else time.monotonic()

    # -- JobProcess ----------------------------------------------------------------------------

    def watch(
        self, selector: selectors.BaseSelector, ended: Callable[[], None], reported: Callable[[], None]
    ) -> None:
        self._ended, self._reported = ended, reported

    def send(self, number: int) -> None:
        if self.status is None:
            self._send_frame(frames.Signal(self.index, int(number), False))

    def send_group(self, number: int) -> None:
        if not self.is_released:
            self._send_frame(frames.Signal(self.index, int(number), True))
            if number == signal.SIGKILL and self.status is None:
                self.was_killed = True
                self.agent.expect_exit()

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self._send_frame(frames.Release(self.index))

    def reap(self) -> None:
        """Mark it as released; its agent reaps it."""
        self.is_released = True

    def read_reports(self) -> None:
        """Do nothing: the agent sends reports as they come."""

    def take_notices(self) -> Sequence[Report]:
        notices, self._notices = self._notices, ()
        return notices

    @property
    def seconds(self) -> float:
        return self.ended_at - self._began if self._seconds is None else self._seconds

    def _send_frame(self, frame: frames.AgentFrame) -> None:
        if not self.lost:
            self.agent.send_frame(frame)
