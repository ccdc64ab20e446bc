"""The removal of lost spaces and their streams, here and on surviving nodes, when a node is replaced.

The caller of each function holds the master's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..commands.line import NodeConnection
from ..node import sessions
from ..tensor.ordering import Streams


def forget_spaces(line: NodeConnection) -> None:
    """Drop the spaces of a lost connection: lost spaces and older connections would keep each other alive."""
    for space in line.spaces:
        if not space.used():
            space.end()
    for each in (line, *line.further):
        each.spaces = []


def forget_what_is_over(lines: Sequence[NodeConnection], streams: Streams | None) -> None:
    """Forget lost spaces that are no longer used, here and on the surviving nodes.

    Spaces still in use are forgotten when the next node is replaced.
    """
    living = [line for line in lines if line.lost is None]
    for line in living:
        for each in (line, *line.further):
            each.flush()  # sends the frees
            each.reap()
    over = {each for line in lines for each in line.spaces if each.lost is not None and not each.used()}
    for space in over:
        space.end()
        theirs = {line for log in space.further for line in log.lines}
        for line in space.lines:
            if line.lost is None:
                ended = [each for each in line.further if each in theirs]
                line.further = [each for each in line.further if each not in theirs]
                line.call(sessions.forget, space.number, [each.stream for each in ended])
                for each in ended:
                    each.end()
    for line in lines:
        line.spaces = [each for each in line.spaces if not each.over]
    if streams is not None:
        streams.forget()
