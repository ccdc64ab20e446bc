"""The last commands of a node's log, kept by the master to find the command that made a tensor.

The history consists of the numbers of each segment and the origin of each operation, which exist anyway and
are kept for some time after the node acknowledged them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...common.formatting import counted
from ..protocol.commands import FIRST, FREE, KEEP, PUT, RELEASE, SHARE, TAKE, WIDTHS
from .origin import CallOrigin, Origin, current_origin, format_origin

#: acknowledged operations kept per node; each segment and each batch counts as one more
MAX_HISTORY_OPERATIONS = 4096

_MADE_BY = {PUT: "a copy from the master", TAKE: "a result of a function", SHARE: "a tensor elsewhere"}
#: descriptions of operators that a program does not call by name
_DESCRIBED = {"shoal_node.receive": "a copy from another node"}
#: commands below FIRST that make tensors
MAKING = frozenset({*_MADE_BY, KEEP})
#: commands below FIRST that make or free tensors
_NAMING = MAKING | {FREE, RELEASE}


class CallSignature(NamedTuple):
    """The parts of an interned call that are needed to read a log.

    Attributes:
        operator: such as ``aten.add.Tensor``.
        operands, results: number of each.
        written: positions of the operands that it writes to.
        given: spaces of the results in other spaces; their ids are the last operands.
    """

    operator: str
    operands: int
    results: int
    written: tuple[int, ...] = ()
    given: tuple[int, ...] = ()


class SegmentOrigins(list[Any]):
    """The origin of each interned call of a segment; for a recorded step, the list of its steps' origins.

    Attributes:
        space: number of the space.
        kinds: kinds of calls, by number.
        numbers: numbers of the segment, set when it is cut.
        made: position among the numbers -> description and origin of a command that makes a tensor.
    """

    __slots__ = ("kinds", "made", "numbers", "space")

    def __init__(self, space: int, kinds: dict[int, CallSignature]) -> None:
        super().__init__()
        self.space = space
        self.kinds = kinds
        self.numbers: Sequence[int] = ()
        self.made: dict[int, tuple[str, Origin | None]] = {}

    def commands(self) -> Iterator[tuple[int, CallSignature | None, int]]:
        """Yield each command's position, kind (None: not an interned call) and number of earlier calls.

        Stops at a call that was forgotten since, because its length is unknown.
        """
        p = calls = 0
        while p < len(self.numbers):
            number = self.numbers[p]
            if number < FIRST:
                yield p, None, calls
                p += WIDTHS[number]
                continue
            kind = self.kinds.get(number)
            if kind is None:
                return
            yield p, kind, calls
            calls += 1
            p += 1 + kind.operands + kind.results

    def add_maker(self, at: int, command: int, asked: str) -> None:
        """Note a command at position `at` that makes a tensor."""
        self.made[at] = _MADE_BY.get(command, asked), current_origin()


def _size(batch: list[SegmentOrigins]) -> int:
    """Return the size of a batch in the history: its operations, plus one per segment and one per batch."""
    return 1 + sum(1 + len(each) for each in batch)


class Maker(NamedTuple):
    """The command that made a tensor.

    Attributes:
        operator: operator or description.
        origin: where the program issued it; for a recorded step, the origins of its steps.
        age: number of operations issued after it.
        pending: True until the node acknowledges it.
        changed: origin of the last in-place operation on the tensor, if any.
    """

    operator: str
    origin: CallOrigin
    age: int
    pending: bool
    changed: Origin | None


class History:
    """The last acknowledged segments of a connection, oldest first."""

    def __init__(self) -> None:
        self._batches: deque[list[SegmentOrigins]] = deque()
        self._size = 0

    def add(self, batch: list[SegmentOrigins]) -> None:
        """Add the segments of an acknowledged batch."""
        self._batches.append(batch)
        self._size += _size(batch)
        while self._size > MAX_HISTORY_OPERATIONS and len(self._batches) > 1:
            self._size -= _size(self._batches.popleft())

    def newest_first(self) -> Iterator[SegmentOrigins]:
        """Iterate over the segments, newest first."""
        for batch in reversed(self._batches):
            yield from reversed(batch)


def maker_of(space: int, id: int, pending: Sequence[SegmentOrigins], history: History) -> Maker | None:
    """Return the command that made tensor `id` of a space; None: it is no longer in the history.

    `pending` are the segments that are not acknowledged, newest first.
    """
    after, changed = 0, None
    for waits, segments in ((True, pending), (False, history.newest_first())):
        for issued in segments:
            found, written, gone = _find_maker(issued, space, id)
            changed = changed or written
            if found is not None:
                operator, origin, position = found
                made_by = _DESCRIBED.get(operator, operator)
                return Maker(made_by, origin, after + len(issued) - position, waits, changed)
            if gone:  # another stream made the tensor that has the id now
                return None
            after += len(issued)
    return None


def _find_maker(
    issued: SegmentOrigins, space: int, id: int
) -> tuple[tuple[str, Any, int] | None, Origin | None, bool]:  # fmt: skip
    """Return the last command of a segment that made a tensor, the last write after it, and whether the id
    was freed instead. The command is: operator, origin, and the number of operations up to and including it.
    """
    numbers, here = issued.numbers, issued.space == space
    found: tuple[str, Any, int] | None = None
    written: Origin | None = None
    gone = False
    for p, kind, position in issued.commands():
        if kind is None:
            number = numbers[p]
            if number not in _NAMING:
                continue
            target = (issued.space, numbers[p + 1]) if number != SHARE else (numbers[p + 3], numbers[p + 4])
            if target != (space, id):
                continue
            gone, written = number not in MAKING, None
            found = None if gone else (*issued.made.get(p, ("", None)), position)
            continue
        first = p + 1 + kind.operands
        if (here and id in numbers[first : first + kind.results]) or (
            kind.given
            and (space, id) in zip(kind.given, numbers[first - len(kind.given) : first], strict=True)
        ):
            found, written, gone = (kind.operator, issued[position], position + 1), None, False
        elif here and any(numbers[p + 1 + at] == id for at in kind.written):
            written = issued[position]
    return found, written, gone


def describe_progress(waiting: Sequence[SegmentOrigins], history: History, stream: int) -> str:
    """Describe the first of the unacknowledged operations `waiting`, else the default stream's last one.

    Thread-safe.
    """
    where = f"stream {stream} of it" if stream else "it"
    for number, issued in enumerate(waiting):
        for operator, origin, later in _operations(issued):
            later += sum(map(len, waiting[number + 1 :]))
            text = f"{where} had not acknowledged {operator}, issued at {format_origin(origin)}"
            return f"{text}; {counted(later, 'operation')} came after it" if later else text
    if stream:
        return ""
    with suppress(RuntimeError):  # another thread adds to it
        for issued in history.newest_first():
            for operator, origin, _ in reversed(list(_operations(issued))):
                done = "it had done all operations sent to it"
                return f"{done}; the last was {operator}, issued at {format_origin(origin)}"
    return ""


def _operations(issued: SegmentOrigins) -> Iterator[tuple[str, Any, int]]:
    """Yield each operation of a segment: operator, origin, number of operations after it."""
    for p, kind, position in issued.commands():
        if kind is not None:
            yield kind.operator, issued[position], len(issued) - position - 1
        elif p in issued.made:
            yield *issued.made[p], len(issued) - position
