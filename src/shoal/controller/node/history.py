"""The record of what a stream executes: its last commands, their times in a trace, and its batch's reply.

The node keeps the last logs and reads them on demand, so that executing a command costs nothing more.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any

from ..protocol import commands
from ..protocol.commands import DEFINE, FIRST, FREE, RELEASE, WAIT, Definition, OperationFailure

#: maximum number of commands in a dump
MAX_DUMP_COMMANDS = 256
#: number of preceding commands in the error of a failed one
ERROR_CONTEXT_COMMANDS = 5
#: maximum bytes of logs that are kept; the last one is always kept
MAX_LOG_BYTES = 2**18
#: number of last commands of a node, and of batched commands and waits of the master, that a trace keeps
MAX_TRACE_EVENTS = 200_000

#: stream, batch, segment in it, position among its numbers, name, begin and end in nanoseconds
Event = tuple[int, int, int, int, str, int, int]

_NAMES = {
    number: name.lower()
    for name, number in vars(commands).items()
    if name.isupper() and isinstance(number, int) and number < FIRST
}
#: commands that compute nothing
_UNLISTED = frozenset({FREE, DEFINE, RELEASE, WAIT})

#: (tensors, numbers, position in the numbers, scalars, position in the scalars)
Run = Callable[[list[Any], Any, int, Any, int], None]
#: function, length in numbers and number of scalars of each call of a space
_Calls = Mapping[int, tuple[Run, int, int]]
#: the calls and the definitions of a space, and the numbers of a log
_Log = tuple[_Calls, Mapping[int, Definition], bytes]


def command_name(number: int, definitions: Mapping[int, Definition]) -> str:
    definition = definitions.get(number)
    if definition is None:
        return _NAMES.get(number, "a recorded step")
    return definition.operator.replace("::", ".")


class RecentCommands:
    """The last logs of a stream; any thread may read the commands.

    `code` is that of the function that executes a log; its local variable ``p`` is the position.
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._logs: deque[_Log] = deque()
        self._size = 0

    def begin(self, calls: _Calls, definitions: Mapping[int, Definition], numbers: bytes) -> None:
        """Add a log that will be executed now, with the calls that its numbers stand for."""
        logs = self._logs
        logs.append((calls, definitions, numbers))
        self._size += len(numbers)
        while len(logs) > MAX_DUMP_COMMANDS or (self._size > MAX_LOG_BYTES and len(logs) > 1):
            self._size -= len(logs.popleft()[2])

    def clear(self) -> None:
        """Forget the logs, because their numbers will be reused for other calls."""
        self._logs.clear()
        self._size = 0

    def before(self) -> str:
        """Return the names of the commands before the one that this thread executes."""
        found, _ = self.commands(sys._getframe())
        return ", ".join(found[-ERROR_CONTEXT_COMMANDS:])

    def commands(self, frame: FrameType | None = None) -> tuple[list[str], str]:
        """Return the last completed commands, and the running one, or "".

        `frame` is a frame of the executing thread; None: search all threads.
        """
        logs = list(self._logs)
        frames = [frame] if frame is not None else list(sys._current_frames().values())
        at, running = self._position(frames, logs[-1][2]) if logs else None, ""
        done: list[str] = []
        for index in range(len(logs) - 1, -1, -1):
            last = index == len(logs) - 1
            names, now = _names(*logs[index], at if last else None)
            running = now or running
            done = names + done
            if len(done) >= MAX_DUMP_COMMANDS:
                break
        return done[-MAX_DUMP_COMMANDS:], running

    def _position(self, frames: Sequence[FrameType | None], numbers: bytes) -> int | None:
        for each in frames:
            while each is not None and each.f_code is not self._code:
                each = each.f_back
            if each is not None and each.f_locals.get("numbers") is numbers:
                position: int | None = each.f_locals.get("p", 0)
                return position
        return None


def _names(
    calls: _Calls, definitions: Mapping[int, Definition], log: bytes, at: int | None
) -> tuple[list[str], str]:
    """Return the commands of a log before position `at`, and the one there; `at` is None if all are done."""
    names: list[str] = []
    numbers = array("I", log)
    p = 0
    while p < len(numbers):
        number = numbers[p]
        width = calls.get(number, (None, 0, 0))[1]
        name = command_name(number, definitions)
        if at is not None and p >= at:
            return names, name
        if number not in _UNLISTED:
            names.append(name)
        if not width:  # the call was forgotten meanwhile
            break
        p += width
    return names, ""


# -- traces ------------------------------------------------------------------------------------------


class Timing:
    """The times of the commands of all streams of a session."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_TRACE_EVENTS)
        self._count = 0
        self._lock = threading.Lock()

    def note(self, running: BatchReply, position: int, name: str, begun: int) -> None:
        """Record a command that began at `begun` and ends now."""
        event = (
            running.stream, running.batch, running.segment, position, name, begun, time.monotonic_ns(),
        )  # fmt: skip
        with self._lock:
            self._count += 1
            self._events.append(event)

    def collected(self) -> tuple[list[Event], int]:
        """Return the events, and the number of dropped older ones."""
        with self._lock:
            return list(self._events), self._count - len(self._events)


class TimedCalls:
    """The calls of a space, each of which records its time."""

    def __init__(
        self, timing: Timing, running: BatchReply, calls: _Calls, definitions: Mapping[int, Definition]
    ) -> None:
        self._timing, self._running, self._calls, self._definitions = timing, running, calls, definitions

    def __getitem__(self, number: int) -> tuple[Run, int, int]:
        run, width, used = self._calls[number]
        return partial(self._run, run, number), width, used

    def _run(self, run: Run, number: int, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        name, begun = command_name(number, self._definitions), time.monotonic_ns()
        try:
            run(t, a, p, s, q)
        finally:
            self._timing.note(self._running, p, name, begun)


# -- replies -----------------------------------------------------------------------------------------


class Poison:
    """The replacement of a tensor that could not be computed because of `failure`."""

    __slots__ = ("failure",)

    def __init__(self, failure: OperationFailure) -> None:
        self.failure = failure


class BatchReply:
    """The reply to the batch that a stream executes.

    Attributes:
        values: the values that the master requested.
        failures: the failed operations.
        stream, batch, segment: numbers of the stream and the batch, index of the running segment.
        poisons: numbers for failures.
        recent: the last commands.
    """

    def __init__(self, stream: int, poisons: Iterator[int], code: CodeType) -> None:
        self.stream = stream
        self.poisons = poisons
        self.recent = RecentCommands(code)
        self.begin(0)

    def add_poison(self, poison: Poison) -> None:
        """Add a requested value that could not be computed."""
        self.values.append(("poison", tuple(poison.failure)))

    def begin(self, batch: int) -> None:
        self.batch = batch
        self.values: list[Any] = []
        self.failures: list[OperationFailure] = []
        self.segment = 0
