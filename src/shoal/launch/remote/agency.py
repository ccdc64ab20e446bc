"""One agent, as the launcher sees it: its connection, its clock, its processes."""

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

#: seconds in which an agent must tell of the end of a process that it was to kill, or say Bye
_PATIENCE = 10.0
#: bytes of output that are read before the agent is told of it
_WORTH_TELLING = 1 << 16
#: beats whose answers set the agent's clock, and how many of them come one upon the other at first
_KEPT, _QUICK = 16, 5
#: seconds that ssh has to end when its connection has ended, unless another one had them just now
_SOON = 0.2


class Listening(Protocol):
    """A descriptor that a loop waits for, as :class:`~shoal.launch.ranks.source.OutputSource` is."""

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None: ...
    def ignore(self) -> None: ...


class Way(Protocol):
    """What leads to a host.

    Attributes:
        name: of the program.
        carrier: the connection to the agent.
        stderr: what the program, or the agent, says to the user.
        said: its last lines.
    """

    @property
    def name(self) -> str: ...
    @property
    def carrier(self) -> Carrier: ...
    @property
    def stderr(self) -> Listening: ...
    @property
    def said(self) -> list[str]: ...

    def hear(self) -> None:
        """Read what is there of stderr."""

    def end(self, timeout: float) -> int | None:
        """The connection has ended: end what led to it, in so many seconds; its exit code if it has one."""


@dataclass
class Watcher:
    """What the crew does when something happens to an agent.

    Attributes:
        lost: the agent is out of reach; the ranks that had not ended are given.
        not_started: a process could not be started, and why.
        stdin_taken: rank 0 has taken so many bytes.
    """

    lost: Callable[[AgentClient, list[RemoteRank]], None]
    not_started: Callable[[RemoteRank, str], None]
    stdin_taken: Callable[[int], None]


class AgentClient:
    """The agent of one host.

    Args:
        host: its host.
        client: what leads to it.
        watcher: told what happens; may be given later.

    Attributes:
        hello: what the agent says of itself, None before that.
        is_ready: it has taken what :class:`Begin` says.
        trouble: why it cannot be used any more, "" while it can.
        killed: what it has killed in the end, None before that.
        is_held: frames on processes wait, because nobody could use what they say.
    """

    #: when the loop may wait for the end of a process that leads to an agent
    _waits_at: ClassVar[float] = 0.0

    def __init__(self, host: Host, client: Way) -> None:
        self.host = host
        self.client = client
        self.watcher: Watcher | None = None
        self.hello: Hello | None = None
        self.is_ready = False
        self.trouble = ""
        self.killed: tuple[str, ...] | None = None
        self.is_held = True
        self.ranks: dict[int, RemoteRank] = {}
        self._pending: set[int] = set()
        self._held: deque[FromAgent] = deque()
        self._heard = self._beat_at = time.monotonic()
        self._began = self._heard
        self._due = math.inf
        #: told to end; and whether output has come since it was due last
        self._is_ending = self._moves = False
        self._unread = self._untold = 0
        self._clock: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._link: AgentConnection[FromAgent] = AgentConnection(
            client.carrier, decode_from_agent, self._received, self._link_lost, preamble=PREAMBLE
        )

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Work in the loop of ``selector``."""
        if not self.trouble:
            self._link.watch(selector)
            self.client.stderr.ignore()
            self.client.stderr.listen(selector, self.client.hear)

    def tell(self, frame: Any) -> None:
        """Send a frame to the agent, if it can be reached."""
        if not self.trouble:
            self._link.send(frame)

    def add(self, rank: RemoteRank) -> None:
        """``rank`` was asked of the agent."""
        self.ranks[rank.index] = rank
        self._pending.add(rank.index)

    @property
    def is_settled(self) -> bool:
        """Whether all that was asked of it was answered."""
        return self.is_ready and not self._pending

    @property
    def is_well(self) -> bool:
        """Whether it can start processes."""
        return self.is_ready and not self.trouble and self.killed is None

    def suspend(self) -> None:
        """This process is about to be stopped: the agent must not take its silence for its end."""
        self.tell(Suspend())

    @property
    def is_told(self) -> bool:
        """Whether the agent has been sent everything, or cannot be reached."""
        return bool(self.trouble) or self._link.closed or self._link.sent

    def flush(self) -> None:
        """Go on sending."""
        if not self.trouble:
            self._link.poll()

    def resume(self) -> None:
        """This process has been continued: the agent's silence until now means nothing."""
        now = time.monotonic()
        if self._due < math.inf:
            self._due = now + _PATIENCE
        self._heard = self._beat_at = now

    def expect_bye(self, linger: float) -> None:
        """It was told to end."""
        self._is_ending = True
        self._due = time.monotonic() + linger + _PATIENCE

    def next_at(self) -> float:
        """When :meth:`tick` has something to do."""
        if self.trouble or self.killed is not None:
            return math.inf
        if self._held and not self.is_held:
            return 0.0
        # Until it has answered for the first time, others decide how long it may be silent.
        silent_at = math.inf if self.hello is None else self._heard + SILENCE
        return min(self._beat_at, silent_at, self._due)

    def tick(self, now: float) -> None:
        """Beat, and lose patience with an agent that is silent."""
        while self._held and not self.is_held and not self.trouble:
            self._guarded(self._held.popleft())
        if self.trouble or self.killed is not None:
            return
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            if self.hello is not None:
                self._link.send(Beat(now))
        if self.hello is not None and now >= self._heard + SILENCE:
            # It may have spoken while this process had other things to do, or stood still.
            self._link.poll()
        if self.trouble or self.killed is not None:
            return
        if self.hello is not None and now >= self._heard + SILENCE:
            self.lose(f"nothing has come from its agent for {SILENCE:.0f} s")
        elif now >= self._due:
            # With output that nobody has read yet, the agent waits; on a slow line it comes late.
            if self._unread or (self._is_ending and self._moves):
                self._due, self._moves = now + _PATIENCE, False
            else:
                self.lose(f"its agent has not ended what it was told to end for {_PATIENCE:.0f} s")

    def lose(self, why: str) -> None:
        """Give the agent up: it kills all that it has when its connection ends."""
        if self.trouble:
            return
        self.client.stderr.ignore()
        self._link.close()
        # Of many that are lost at once the loop waits for one: the others need its beats.
        now = time.monotonic()
        code = self.client.end(_SOON if now >= AgentClient._waits_at else 0.0)
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
        """Leave the selector."""
        if not self.trouble:
            self._link.watch(None)
            self.client.stderr.ignore()

    def hang_up(self) -> None:
        """End the connection; the agent ends then."""
        if not self.trouble:
            self.leave()
            self._link.close()

    def close(self, timeout: float) -> None:
        """End the process that leads to the agent, after :meth:`hang_up`."""
        if not self.trouble:
            self.trouble = "it was closed"
            self.client.end(timeout)

    @property
    def noise(self) -> bytearray:
        """What the other host wrote before its agent spoke."""
        return self._link.noise

    # -- for its ranks -------------------------------------------------------------------------

    def taken(self, amount: int) -> None:
        """So many bytes of output were read; the agent is told when that is worth a frame."""
        self._unread -= amount
        self._untold += amount
        if self._untold >= _WORTH_TELLING or not self._unread:
            amount, self._untold = self._untold, 0
            if amount and not self.trouble:
                self._link.send(Taken(amount))

    def here(self, moment: float) -> float:
        """A moment of the agent's clock on this one's.

        The answer to a beat was written between the beat and its arrival; of the last ones that which was
        fastest tells best, to half of the time that it took.
        """
        return moment - min(self._clock)[1] if self._clock else time.monotonic()

    def must_end(self) -> None:
        """A process was sent SIGKILL."""
        if self._due == math.inf:
            self._due = time.monotonic() + _PATIENCE

    # -- frames --------------------------------------------------------------------------------

    def _link_lost(self, why: str) -> None:
        self.lose(why)

    def _guarded(self, frame: FromAgent) -> None:
        try:
            self._handle(frame)
        except WireError as error:
            self.lose(str(error))

    def _received(self, frame: FromAgent) -> None:
        """Handle a frame; raises WireError if it may not come now."""
        self._heard = time.monotonic()
        if isinstance(frame, Hello) != (self.hello is None):
            raise WireError("it does not begin as an agent does")
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
                if self.is_held or self._held:
                    self._held.append(frame)
                    self._count(frame)
                else:
                    self._count(frame)
                    self._handle(frame)
            case _:
                raise WireError(f"a {type(frame).__name__} came when none may come")

    def _count(self, frame: FromAgent) -> None:
        if isinstance(frame, ProcessOutput):
            self._moves = True
            self._unread += len(frame.data)
            if self._unread + self._untold > WINDOW + MOST_BYTES:
                raise WireError("it sent more output than it may")
        elif len(self._held) > 10_000:
            raise WireError("it sent more than it may")

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
                    raise WireError("it said Bye while processes ran")
                self.killed = tuple(map(printable, frame.killed))

    def _rank(self, index: int) -> RemoteRank:
        if index not in self.ranks or index in self._pending:
            raise WireError(f"it spoke of process {index}, which it was not to start")
        return self.ranks[index]

    def _set_clock(self, beat: Beat) -> None:
        now = time.monotonic()
        if not self._began <= beat.launcher <= now or not math.isfinite(beat.agent):
            raise WireError("it answered a beat that was not sent")
        self._clock.append((now - beat.launcher, beat.agent - (beat.launcher + now) / 2))
        if len(self._clock) < _QUICK:
            self._link.send(Beat(now))
