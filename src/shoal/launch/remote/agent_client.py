"""The launcher's client of one agent: its connection, clock and processes."""

from __future__ import annotations

import math
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ...common.wording import printable
from ...errors import WireError
from ...net import build_version
from ..agent_protocol import (
    BEAT,
    MOST_BYTES,
    PREAMBLE,
    PROTOCOL,
    SILENCE,
    WINDOW,
    Beat,
    Bye,
    Exited,
    FromAgent,
    Hello,
    NotStarted,
    ProcessOutput,
    Ready,
    Reported,
    RequestRefused,
    Started,
    StdinTaken,
    Suspend,
    Taken,
    decode_from_agent,
)
from .hosts import Host
from .link import AgentConnection, Carrier
from .rank import RemoteRank

#: timeout in seconds for an agent to report the end of a killed process, or to send Bye
_REPLY_TIMEOUT_S = 10.0
#: bytes of output to consume before an acknowledgement is sent
_ACK_BYTES = 1 << 16
#: number of heartbeats used to estimate the agent's clock, and of those sent without a pause at first
_CLOCK_SAMPLES, _FIRST_SAMPLES = 16, 5
#: seconds to wait for ssh to exit after its connection has ended, at most once per heartbeat
_SSH_EXIT_TIMEOUT_S = 0.2


class EventSource(Protocol):
    """A source of events for a loop, such as :class:`~shoal.launch.ranks.source.OutputSource`."""

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None: ...
    def ignore(self) -> None: ...


class AgentTransport(Protocol):
    """The program that connects to a host.

    Attributes:
        name: name of the program.
        carrier: the connection to the agent.
        stderr: stderr of the program or the agent.
        said: the last lines of stderr.
    """

    @property
    def name(self) -> str: ...
    @property
    def carrier(self) -> Carrier: ...
    @property
    def stderr(self) -> EventSource: ...
    @property
    def stderr_tail(self) -> list[str]: ...

    def read(self) -> None:
        """Read the available bytes of stderr."""

    def end(self, timeout: float) -> int | None:
        """End the program after its connection, within ``timeout`` seconds; return its exit code if known."""


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
    """The launcher's client of the agent of one host.

    Args:
        client: the program that connects to the host.

    Attributes:
        watcher: callbacks; may be set later.
        hello: the agent's first frame; None before it has come.
        is_ready: the agent has handled :class:`Begin`.
        trouble: why the agent cannot be used any more; "" while it can.
        killed: the processes that the agent killed at the end; None before Bye has come.
        is_held: frames about processes are queued, because the supervisor does not run yet.
    """

    #: time after which the loop may wait again for the exit of a program that connects to an agent
    _waits_at: ClassVar[float] = 0.0

    def __init__(self, host: Host, client: AgentTransport) -> None:
        self.host = host
        self.client = client
        self.watcher: AgentCallbacks | None = None
        self.hello: Hello | None = None
        self.is_ready = False
        self.trouble = ""
        self.killed: tuple[str, ...] | None = None
        self.is_queueing = True
        self.ranks: dict[int, RemoteRank] = {}
        self._pending: set[int] = set()
        self._held: deque[FromAgent] = deque()
        self._heard = self._beat_at = time.monotonic()
        self._began = self._heard
        self._due = math.inf
        #: the agent was asked to end; output has come since Bye was last due
        self._is_ending = self._moves = False
        self._unread = self._untold = 0
        self._clock: deque[tuple[float, float]] = deque(maxlen=_CLOCK_SAMPLES)
        self._link: AgentConnection[FromAgent] = AgentConnection(
            client.carrier, decode_from_agent, self._received, self._link_lost, preamble=PREAMBLE
        )

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Handle events in the loop of ``selector``."""
        if not self.trouble:
            self._link.watch(selector)
            self.client.stderr.ignore()
            self.client.stderr.listen(selector, self.client.read)

    def tell(self, frame: Any) -> None:
        """Send a frame to the agent, unless it is lost."""
        if not self.trouble:
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
        """Whether the agent can start processes."""
        return self.is_ready and not self.trouble and self.killed is None

    def suspend(self) -> None:
        """Tell the agent that this process is about to be suspended, and will be silent."""
        self.tell(Suspend())

    @property
    def is_flushed(self) -> bool:
        """Whether all frames were sent, or the agent is lost."""
        return bool(self.trouble) or self._link.closed or self._link.sent

    def flush(self) -> None:
        """Continue to send queued frames."""
        if not self.trouble:
            self._link.poll()

    def resume(self) -> None:
        """Restart all timeouts, after this process was continued."""
        now = time.monotonic()
        if self._due < math.inf:
            self._due = now + _REPLY_TIMEOUT_S
        self._heard = self._beat_at = now

    def expect_bye(self, linger: float) -> None:
        """Start the timeout for Bye, after :class:`End` was sent."""
        self._is_ending = True
        self._due = time.monotonic() + linger + _REPLY_TIMEOUT_S

    def next_at(self) -> float:
        """The time of the next :meth:`tick`."""
        if self.trouble or self.killed is not None:
            return math.inf
        if self._held and not self.is_queueing:
            return 0.0
        # Before Hello, the caller has a timeout of its own.
        silent_at = math.inf if self.hello is None else self._heard + SILENCE
        return min(self._beat_at, silent_at, self._due)

    def tick(self, now: float) -> None:
        """Send a heartbeat if one is due, and check timeouts of the agent."""
        while self._held and not self.is_queueing and not self.trouble:
            self._guarded(self._held.popleft())
        if self.trouble or self.killed is not None:
            return
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            if self.hello is not None:
                self._link.send(Beat(now))
        if self.hello is not None and now >= self._heard + SILENCE:
            # A frame may have come while this process was busy or stopped.
            self._link.poll()
        if self.trouble or self.killed is not None:
            return
        if self.hello is not None and now >= self._heard + SILENCE:
            self.lose(f"nothing has come from its agent for {SILENCE:.0f} s")
        elif now >= self._due:
            # The agent waits while its output is not consumed, and Bye is late on a slow connection.
            if self._unread or (self._is_ending and self._moves):
                self._due, self._moves = now + _REPLY_TIMEOUT_S, False
            else:
                self.lose(f"its agent has not ended its processes as requested for {_REPLY_TIMEOUT_S:.0f} s")

    def lose(self, why: str) -> None:
        """Treat the agent as lost, and close its connection; the agent then kills its processes."""
        if self.trouble:
            return
        self.client.stderr.ignore()
        self._link.close()
        # If many agents are lost at once, the loop waits for one only: the others need heartbeats.
        now = time.monotonic()
        code = self.client.end(_SSH_EXIT_TIMEOUT_S if now >= AgentClient._waits_at else 0.0)
        AgentClient._waits_at = now + BEAT
        parts = [why]
        if code is not None:
            parts.append(f"{self.client.name} ended with exit code {code}")
        self.trouble = printable("; ".join(parts))
        gone = [rank for rank in self.ranks.values() if rank.lose(self.trouble)]
        self._pending.clear()
        if self.watcher is not None and self.killed is None:
            self.watcher.lost(self, gone)

    def leave(self) -> None:
        """Stop to handle events in the loop."""
        if not self.trouble:
            self._link.watch(None)
            self.client.stderr.ignore()

    def disconnect(self) -> None:
        """Close the connection; the agent then exits."""
        if not self.trouble:
            self.leave()
            self._link.close()

    def close(self, timeout: float) -> None:
        """End the program that connects to the agent, after :meth:`disconnect`."""
        if not self.trouble:
            self.trouble = "it was closed"
            self.client.end(timeout)

    @property
    def noise(self) -> bytearray:
        """Output of the other host before the agent's preamble."""
        return self._link.noise

    # -- for its ranks -------------------------------------------------------------------------

    def taken(self, amount: int) -> None:
        """Record that ``amount`` bytes of output were consumed; acknowledge them if they are enough."""
        self._unread -= amount
        self._untold += amount
        if self._untold >= _ACK_BYTES or not self._unread:
            amount, self._untold = self._untold, 0
            if amount and not self.trouble:
                self._link.send(Taken(amount))

    def here(self, moment: float) -> float:
        """Convert a time of the agent's clock to this process's clock.

        The reply to a heartbeat was sent between the heartbeat and the arrival of the reply.  The fastest of
        the last replies gives the offset to within half of its round-trip time.
        """
        return moment - min(self._clock)[1] if self._clock else time.monotonic()

    def must_end(self) -> None:
        """Start the timeout for the end of a process, after SIGKILL was sent."""
        if self._due == math.inf:
            self._due = time.monotonic() + _REPLY_TIMEOUT_S

    # -- frames --------------------------------------------------------------------------------

    def _link_lost(self, why: str) -> None:
        self.lose(why)

    def _guarded(self, frame: FromAgent) -> None:
        try:
            self._handle(frame)
        except WireError as error:
            self.lose(str(error))

    def _received(self, frame: FromAgent) -> None:
        self._heard = time.monotonic()
        if isinstance(frame, Hello) != (self.hello is None):
            raise WireError("it must send Hello once, as its first frame")
        match frame:
            case Hello():
                self.hello = frame
                if (frame.version, frame.protocol) != (build_version(), PROTOCOL):
                    raise WireError(
                        f"it runs shoal {frame.version} (agents' protocol {frame.protocol}), and this is "
                        f"shoal {build_version()} (protocol {PROTOCOL}): install the same version everywhere"
                    )
                self._link.send(Beat(self._heard))
            case Beat():
                self._set_clock(frame)
            case Ready() if not self.is_ready:
                self.is_ready = True
            case RequestRefused() if not self.is_ready:
                raise WireError(frame.text)
            case Started() | NotStarted() if frame.index in self._pending:
                self._pending.remove(frame.index)
                rank = self.ranks[frame.index]
                if isinstance(frame, Started):
                    rank.pid = frame.pid
                elif self.watcher is not None:
                    self.watcher.not_started(rank, printable(frame.text))
                    rank.not_started()
            case ProcessOutput() | Reported() | Exited() | StdinTaken() | Bye() if self.is_ready:
                if self.is_queueing or self._held:
                    self._held.append(frame)
                    self._count(frame)
                else:
                    self._count(frame)
                    self._handle(frame)
            case _:
                raise WireError(f"it sent an unexpected {type(frame).__name__}")

    def _count(self, frame: FromAgent) -> None:
        if isinstance(frame, ProcessOutput):
            self._moves = True
            self._unread += len(frame.data)
            if self._unread + self._untold > WINDOW + MOST_BYTES:
                raise WireError("it sent more output than the window allows")
        elif len(self._held) > 10_000:
            raise WireError("it sent too many frames")

    def _handle(self, frame: FromAgent) -> None:
        match frame:
            case ProcessOutput():
                self._rank(frame.index).wrote(frame)
            case Reported():
                self._rank(frame.index).reported(frame)
            case Exited():
                self._rank(frame.index).exited(frame)
                if not any(rank.status is None and rank.was_killed for rank in self.ranks.values()):
                    self._due = math.inf
            case StdinTaken():
                if self.watcher is not None:
                    self.watcher.stdin_taken(frame.amount)
            case Bye():
                if any(rank.status is None for rank in self.ranks.values()):
                    raise WireError("it sent Bye while processes were running")
                self.killed = tuple(map(printable, frame.killed))

    def _rank(self, index: int) -> RemoteRank:
        if index not in self.ranks or index in self._pending:
            raise WireError(f"it sent a frame about process {index}, which it was not asked to start")
        return self.ranks[index]

    def _set_clock(self, beat: Beat) -> None:
        now = time.monotonic()
        if not self._began <= beat.launcher <= now or not math.isfinite(beat.agent):
            raise WireError("it replied to a heartbeat that was not sent")
        self._clock.append((now - beat.launcher, beat.agent - (beat.launcher + now) / 2))
        if len(self._clock) < _FIRST_SAMPLES:
            self._link.send(Beat(now))
