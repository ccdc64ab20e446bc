"""What a master calls at a worker: the functions of a session."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .execute import Tensors


class _Session:
    """One master's session here; batches run in the order of their numbers, whatever thread has them."""

    def __init__(self) -> None:
        self.tensors = Tensors(torch.device("cpu"))
        self.turn = threading.Condition()
        self.next = 0


_sessions: dict[str, _Session] = {}


def begin(session: str) -> None:
    """Make an empty session."""
    _sessions[session] = _Session()


def run(
    session: str, number: int, numbers: bytes, scalars: bytes, high: int, payloads: Sequence[Any]
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Execute the batch ``number`` of a session, after those before it; as :meth:`Tensors.run`."""
    held = _sessions[session]
    with held.turn:
        held.turn.wait_for(lambda: held.next == number)
        try:
            return held.tensors.run(numbers, scalars, high, payloads)
        finally:
            held.next = number + 1
            held.turn.notify_all()


def end(session: str) -> None:
    """Let go of all tensors of a session."""
    _sessions.pop(session, None)
