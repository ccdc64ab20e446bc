"""A Ctrl-C between any two bytecodes of whoever takes a reply loses nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from types import FrameType
from typing import Any

from shoal.rpc import Agent
from shoal.rpc.calls.call import _CallSource
from shoal.testing import Agents
from tests.rpc import handlers
from tests.support.bytecodes import enable_opcode_events


def _interrupted(source: _CallSource, steps: int) -> bool:
    """Take the reply, with a Ctrl-C before the bytecode of this number; whether it came to that."""
    left = steps

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code is not _CallSource.reply.__code__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    enable_opcode_events()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            source.reply()
    finally:
        sys.settrace(before)
    return left <= 0


def test_a_ctrl_c_at_any_step_of_taking_a_reply_leaves_it_there(meeting: Agents, a: Agent) -> None:
    other = meeting.join("b", timeout=handlers.PATIENCE)
    for steps in range(1, 1000):
        future = other.peer("a").call(handlers.echo, steps)
        source = future._source
        assert isinstance(source, _CallSource)
        while not source.done():
            time.sleep(0.0001)
        reached = _interrupted(source, steps)
        assert future.wait(handlers.PATIENCE) == steps
        if not reached:
            break
    assert steps > 5
