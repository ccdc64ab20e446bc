"""The last commands of a node's log, as the master keeps them for questions: what made a tensor, and where.

Nothing is written down for it but what is there anyway: a segment's numbers, and the program's line of each
of its operations.  Both are kept for a while after the node has acknowledged them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..protocol.commands import FIRST, FREE, KEEP, PUT, RELEASE, SHARE, TAKE, WIDTHS
from .issuing import Origin, issuing_line

#: operations of a node that are kept after they were acknowledged; each segment and batch counts as one more
KEPT = 4096

_MADE_BY = {PUT: "a copy from the master", TAKE: "a result of a function", SHARE: "a tensor elsewhere"}
#: commands below FIRST that make a tensor
MAKING = frozenset({*_MADE_BY, KEEP})
#: and those that make or free one
_NAMING = MAKING | {FREE, RELEASE}


class Kind(NamedTuple):
    """An interned call, as far as it is needed to read a log.

    Attributes:
        operator: ``aten.add.Tensor``.
        operands, results: how many.
        written: positions of the operands that it writes to.
        given: spaces of results that are in other ones, whose ids are the last operands.
    """

    operator: str
    operands: int
    results: int
    written: tuple[int, ...] = ()
    given: tuple[int, ...] = ()


class Issued(list[Any]):
    """Where the program issued each interned call of a segment; of a program, where it issued each step.

    Attributes:
        space: number of the space.
        kinds: of its calls, by number.
        numbers: of the segment, as soon as it is cut.
        made: by position among the numbers, the operator and the line of commands that make tensors.
    """

    __slots__ = ("kinds", "made", "numbers", "space")

    def __init__(self, space: int, kinds: dict[int, Kind]) -> None:
        super().__init__()
        self.space = space
        self.kinds = kinds
        self.numbers: Sequence[int] = ()
        self.made: dict[int, tuple[str, Origin | None]] = {}

    def commands(self) -> Iterator[tuple[int, Kind | None, int]]:
        """Each command: its position among the numbers, its kind, and how many interned calls come before.

        The kind of a command that is no interned call is None.  Nothing comes after a call that the nodes
        have forgotten, as nobody knows how long it is.
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

    def note(self, at: int, command: int, asked: str) -> None:
        """A command that makes a tensor comes to position ``at``."""
        self.made[at] = _MADE_BY.get(command, asked), issuing_line()


def _size(batch: list[Issued]) -> int:
    """As many operations as it counts for: one that asks for an element has none, and is kept too."""
    return 1 + sum(1 + len(each) for each in batch)


class Maker(NamedTuple):
    """The command that made a tensor.

    Attributes:
        operator: in words.
        origin: where the program issued it; of a program, where it issued the steps.
        age: operations that were issued after it.
        pending: whether the node has not acknowledged it.
        changed: where the program issued the last operation that wrote to the tensor in place, if any.
    """

    operator: str
    origin: Origin | list[Origin | None] | None
    age: int
    pending: bool
    changed: Origin | None


class History:
    """The segments of a line that were acknowledged, the oldest first."""

    def __init__(self) -> None:
        self._batches: deque[list[Issued]] = deque()
        self._size = 0

    def add(self, batch: list[Issued]) -> None:
        """A batch was acknowledged."""
        self._batches.append(batch)
        self._size += _size(batch)
        while self._size > KEPT and len(self._batches) > 1:
            self._size -= _size(self._batches.popleft())

    def newest_first(self) -> Iterator[Issued]:
        """The segments."""
        for batch in reversed(self._batches):
            yield from reversed(batch)


def maker_of(space: int, id: int, pending: Sequence[Issued], history: History) -> Maker | None:
    """The command that made a tensor; None: it was too long ago.

    Args:
        space: number of the space that has the id.
        pending: segments that are not acknowledged, the newest first.
    """
    after, changed = 0, None
    for waits, segments in ((True, pending), (False, history.newest_first())):
        for issued in segments:
            found, written, gone = _search(issued, space, id)
            changed = changed or written
            if found is not None:
                operator, origin, position = found
                return Maker(operator, origin, after + len(issued) - position, waits, changed)
            if gone:  # another stream made the one that has the id now
                return None
            after += len(issued)
    return None


def _search(
    issued: Issued, space: int, id: int
) -> tuple[tuple[str, Any, int] | None, Origin | None, bool]:  # fmt: skip
    """The last command of a segment that made a tensor, the last write to it after that, and whether the id
    was freed instead.

    The command is its operator, its origin, and how many of the segment's operations came up to it.
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
