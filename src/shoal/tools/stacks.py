"""The stacks in the files of groups and workers: where a program stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

#: frames of Python's own library, of installed packages and of shoal, which hide where the program is
_INSTALLED = re.compile(
    rf"/lib/python3|/(site|dist)-packages/|/src/shoal/|{re.escape(str(Path(__file__).parents[1]))}/"
)


class Stack(msgspec.Struct):
    """One thread, the innermost frame last."""

    thread: str
    frames: list[str]


def place_of(stacks: Sequence[Stack]) -> str:
    """The innermost frame of the program in the main thread; of a library if there is no other."""
    frames = next((stack.frames for stack in stacks if stack.thread == "MainThread"), [])
    own = [frame for frame in frames if not _INSTALLED.search(frame)]
    return (own or frames or [""])[-1]
