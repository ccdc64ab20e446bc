"""Trace functions that are called before each bytecode."""

from __future__ import annotations

import sys
from types import FrameType


def enable_opcode_events() -> None:
    """Let trace functions that are set from now on receive events of the kind "opcode".

    In CPython 3.12 ``sys.settrace`` requests these events only if a frame has had ``f_trace_opcodes`` set
    before, so a trace function that sets it itself receives none the first time.  The frame must be one that
    is being traced: CPython 3.12.1 crashes when another one has it.
    """
    before = sys.gettrace()
    sys.settrace(_trace)
    try:
        _traced()
    finally:
        sys.settrace(before)


def _trace(frame: FrameType, event: str, argument: object) -> None:
    frame.f_trace_opcodes = True


def _traced() -> None:
    pass
