"""Stacks in the dumps of groups and workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

#: frames of the standard library, installed packages and shoal, which hide the program's position
_INSTALLED = re.compile(
    rf"/lib/python3|/(site|dist)-packages/|/src/shoal/|{re.escape(str(Path(__file__).parents[1]))}/"
)


class Stack(msgspec.Struct):
    """The stack of one thread, innermost frame last."""

    thread: str
    frames: list[str]


def place_of(stacks: Sequence[Stack]) -> str:
    """The program's innermost frame in the main thread; if it has none there, a library's."""
    frames = next((stack.frames for stack in stacks if stack.thread == "MainThread"), [])
    own = [frame for frame in frames if not _INSTALLED.search(frame)]
    return (own or frames or [""])[-1]
