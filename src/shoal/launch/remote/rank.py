"""A rank on another host, controlled through its agent."""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ...errors import WireError
from ...failure_report import Report
from ..agent_protocol import Close, Exited, ProcessOutput, Release, Reported, Signal
from ..ranks.rank import LOST, JobProcess


class AgentInterface(Protocol):
    """The part of an agent's client that its ranks use."""

    def tell(self, frame: msgspec.Struct) -> None:
        """Send a frame."""

    def taken(self, amount: int) -> None:
        """Record that ``amount`` bytes of output were consumed."""

    def here(self, moment: float) -> float:
        """Convert a time of the agent's clock to this host's clock, approximately."""

    def must_end(self) -> None:
        """Start the timeout for the end of a process, after SIGKILL was sent."""


class RelayQueue:
    """A queue of relays that have output to write.

    Writing short lines takes longer than receiving them, and must not delay exits and heartbeats.
    """

    def __init__(self) -> None:
        self._queue: deque[Relay] = deque()

    def add(self, relay: Relay) -> None:
        """Add ``relay``, which has output."""
        if relay not in self._queue:
            self._queue.append(relay)

    def take(self, until: float) -> None:
        """Write one chunk of each relay in turn, until the time ``until``."""
        while self._queue:
            self._queue.popleft().turn()
            if time.monotonic() >= until:
                break

    def __bool__(self) -> bool:
        return bool(self._queue)


class Relay:
    """stdout or stderr of a rank on another host.

    Args:
        turns: the queue for relays that have output.
        taken: called with the number of bytes that were consumed.
        closed: called when the reader closes the relay before the end of the output.
    """

    def __init__(self, turns: RelayQueue, taken: Callable[[int], None], closed: Callable[[], None]) -> None:
        self._turns, self._taken, self._closed = turns, taken, closed
        self._chunks: deque[bytes] = deque()
        self._ready: Callable[[], object] | None = None
        self._is_closed = False
        #: the end of the output has come
        self.ended = False

    def feed(self, data: bytes) -> None:
        """Add received bytes; ``b""`` is the end."""
        if self.ended:
            raise WireError("it sent output after its end")
        if self._is_closed:
            self._taken(len(data))
            return
        if data:
            self._chunks.append(data)
        self.ended = not data
        self._offer()

    def read(self) -> bytes:
        if not self._chunks:
            if self.ended:
                return b""
            raise BlockingIOError
        data = self._chunks.popleft()
        self._taken(len(data))
        return data

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None:
        self._ready = ready
        self._offer()

    def ignore(self) -> None:
        self._ready = None

    def close(self) -> None:
        self.ignore()
        if not self._is_closed:
            self._is_closed = True
            while self._chunks:
                self._taken(len(self._chunks.popleft()))
            if not self.ended:
                self._closed()

    def turn(self) -> None:
        """Call the reader once."""
        if self._ready is not None and (self._chunks or self.ended):
            self._ready()
            self._offer()

    def _offer(self) -> None:
        if self._ready is not None and (self._chunks or self.ended):
            self._turns.add(self)


class RemoteRank(JobProcess):
    """A process that an agent has started, or is about to start.

    Args:
        `agent`: the client of the agent of its host.
        turns: the queue for its output.
        size: number of ranks of the job.
    """

    def __init__(
        self,
        index: int,
        slot: int,
        restart: int,
        *,
        host: str,
        agent: AgentInterface,
        turns: RelayQueue,
        size: int,
        newcomer: bool,
    ) -> None:
        super().__init__(index, slot, restart, newcomer=newcomer, host=host)
        self._agent = agent
        self._size = size
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._reports: tuple[Report, ...] = ()
        self._joined = False
        self._ended: Callable[[], None] | None = None
        self._reported: Callable[[], None] | None = None
        self._notices: tuple[Report, ...] = ()
        self.was_killed = False
        self.stdout = self._relays_stdout = Relay(turns, agent.taken, lambda: self._tell(Close(index, 1)))
        self.stderr = self._relays_stderr = Relay(turns, agent.taken, lambda: self._tell(Close(index, 2)))

    # -- frames of the agent -------------------------------------------------------------------

    def wrote(self, frame: ProcessOutput) -> None:
        """Handle output of the process."""
        (self._relays_stdout if frame.stream == 1 else self._relays_stderr).feed(frame.data)

    def reported(self, frame: Reported) -> None:
        """Handle reports of the process; raises WireError."""
        numbered = [each for each in (*frame.reports, *frame.notices) if not each.meeting]
        if any(rank >= self._size for report in numbered for rank in report.ranks):
            raise WireError("it sent reports that name unknown ranks")
        if self.status is None:
            self._reports = tuple(replace_at(each, self._moment(each.at)) for each in frame.reports)
            self._joined |= frame.joined
            self._notices += frame.notices
            if self._reported is not None:
                self._reported()

    def exited(self, frame: Exited) -> None:
        """Handle the end of the process; raises WireError."""
        if self.status is not None:
            raise WireError(f"it reported that process {self.index} ended twice")
        longest = time.monotonic() - self._began + 1.0
        self._seconds = frame.seconds if 0.0 <= frame.seconds <= longest else None
        self._end(frame.status, self._moment(frame.at))

    def not_started(self) -> None:
        """Handle that the agent could not start the process."""
        self._released = True
        if self.status is None:
            self._end(127, time.monotonic())
        for relay in (self._relays_stdout, self._relays_stderr):
            if not relay.ended:
                relay.feed(b"")

    def lose(self, why: str) -> bool:
        """Handle the loss of the host; return whether the process had not ended before."""
        for relay in (self._relays_stdout, self._relays_stderr):
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
        here = self._agent.here(at)
        return min(max(here, self._began), time.monotonic()) if here == here else time.monotonic()

    # -- JobProcess ----------------------------------------------------------------------------

    def watch(
        self, selector: selectors.BaseSelector, ended: Callable[[], None], reported: Callable[[], None]
    ) -> None:
        self._ended, self._reported = ended, reported

    def send(self, number: int) -> None:
        if self.status is None:
            self._tell(Signal(self.index, int(number), False))

    def send_group(self, number: int) -> None:
        if not self._released:
            self._tell(Signal(self.index, int(number), True))
            if number == signal.SIGKILL and self.status is None:
                self.was_killed = True
                self._agent.must_end()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._tell(Release(self.index))

    def reap(self) -> None:
        """Mark it as released; its agent reaps it."""
        self._released = True

    def read_reports(self) -> None:
        """Do nothing: the agent sends reports as they come."""

    def take_notices(self) -> Sequence[Report]:
        notices, self._notices = self._notices, ()
        return notices

    @property
    def sent_reports(self) -> Sequence[Report]:
        return self._reports

    @property
    def joined(self) -> bool:
        return self._joined

    @property
    def seconds(self) -> float:
        return self.ended_at - self._began if self._seconds is None else self._seconds

    def _tell(self, frame: msgspec.Struct) -> None:
        if not self.lost:
            self._agent.tell(frame)


def replace_at(report: Report, at: float) -> Report:
    """``report`` with the time ``at``."""
    return msgspec.structs.replace(report, at=at)
