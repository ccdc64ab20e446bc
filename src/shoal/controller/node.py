"""What a master calls at a worker: the functions of a session."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .commands import Segment
from .execute import Spaces


class _Session:
    """One master's session here; batches run in the order of their numbers, whatever thread has them.

    Attributes:
        spaces: the tensors of each.
        turn: guards ``next``.
        next: number of the batch that may run.
    """

    def __init__(self) -> None:
        self.spaces = Spaces(torch.device("cpu"))
        self.turn = threading.Condition()
        self.next = 0

    def run(self, segments: Sequence[Segment]) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """Execute the segments of a batch in their order."""
        outcome = self.spaces.outcome
        outcome.begin()
        for outcome.segment, (space, _, numbers, scalars, high, payloads) in enumerate(segments):
            self.spaces[space].run(numbers, scalars, high, payloads)
        return outcome.values, [tuple(failure) for failure in outcome.failures]


_sessions: dict[str, _Session] = {}


def begin(session: str) -> None:
    """Make an empty session."""
    _sessions[session] = _Session()


def run(session: str, number: int, segments: Sequence[Segment]) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Execute the batch ``number`` of a session, after those before it.

    Returns:
        what was fetched or asked, and what failed.
    """
    held = _sessions[session]
    with held.turn:
        held.turn.wait_for(lambda: held.next == number)
        try:
            return held.run(segments)
        finally:
            held.next = number + 1
            held.turn.notify_all()


def end(session: str) -> None:
    """Let go of all tensors of a session."""
    _sessions.pop(session, None)


def end_all() -> None:
    """Let go of all sessions."""
    _sessions.clear()
