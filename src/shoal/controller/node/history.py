"""The last commands that a stream of a node executed, for errors and dumps.

The node keeps the last logs and reads them on demand, so that executing a command costs nothing more.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from ..protocol import commands
from ..protocol.commands import DEFINE, FIRST, FREE, RELEASE, WAIT, Definition

#: maximum number of commands in a dump
KEPT = 256
#: number of preceding commands in the error of a failed one
TOLD = 5
#: maximum bytes of logs that are kept; the last one is always kept
_MOST = 2**18

_NAMES = {
    number: name.lower()
    for name, number in vars(commands).items()
    if name.isupper() and isinstance(number, int) and number < FIRST
}
#: commands that compute nothing
_SILENT = frozenset({FREE, DEFINE, RELEASE, WAIT})


#: the calls and the definitions of a space, and the numbers of a log
_Log = tuple[Mapping[int, Any], Mapping[int, Definition], bytes]


def named(number: int, definitions: Mapping[int, Definition]) -> str:
    """Return the name of a command or operator."""
    definition = definitions.get(number)
    if definition is None:
        return _NAMES.get(number, "a recorded step")
    return definition.operator.replace("::", ".")


class Recent:
    """The last logs of a stream; any thread may read the commands.

    `code` is that of the function that executes a log; its local variable ``p`` is the position.
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._logs: deque[_Log] = deque()
        self._size = 0

    def begin(
        self, calls: Mapping[int, Any], definitions: Mapping[int, Definition], numbers: bytes
    ) -> None:  # fmt: skip
        """Add a log that will be executed now, with the calls that its numbers stand for."""
        logs = self._logs
        logs.append((calls, definitions, numbers))
        self._size += len(numbers)
        while len(logs) > KEPT or (self._size > _MOST and len(logs) > 1):
            self._size -= len(logs.popleft()[2])

    def clear(self) -> None:
        """Forget the logs, because their numbers will be reused for other calls."""
        self._logs.clear()
        self._size = 0

    def before(self) -> str:
        """Return the names of the commands before the one that this thread executes."""
        found, _ = self.commands(sys._getframe())
        return ", ".join(found[-TOLD:])

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
            if len(done) >= KEPT:
                break
        return done[-KEPT:], running

    def _position(self, frames: Sequence[FrameType | None], numbers: bytes) -> int | None:
        for each in frames:
            while each is not None and each.f_code is not self._code:
                each = each.f_back
            if each is not None and each.f_locals.get("numbers") is numbers:
                position: int | None = each.f_locals.get("p", 0)
                return position
        return None


def _names(
    calls: Mapping[int, Any], definitions: Mapping[int, Definition], log: bytes, at: int | None
) -> tuple[list[str], str]:
    """Return the commands of a log before position `at`, and the one there; `at` is None if all are done."""
    names: list[str] = []
    numbers = array("I", log)
    p = 0
    while p < len(numbers):
        number = numbers[p]
        width = calls.get(number, (None, 0, 0))[1]
        name = named(number, definitions)
        if at is not None and p >= at:
            return names, name
        if number not in _SILENT:
            names.append(name)
        if not width:  # the call was forgotten meanwhile
            break
        p += width
    return names, ""
