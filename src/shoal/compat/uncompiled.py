"""Keeps torch.compile away from the backend's own code.

While compiled code runs, torch tries to compile every Python function that is called, also those that
its own C++ calls: DDP's reducer, say, which reduces gradients in the middle of a compiled pass.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def uncompiled(cls: _Class) -> _Class:
    """Let the methods of a class and of its bases, and all that they call, run as they are."""
    for base in cls.__mro__:
        for method in vars(base).values():
            if isinstance(method, FunctionType) and base.__module__.startswith("shoal."):
                _skip(method)
    return cls


def _skip(function: FunctionType) -> None:
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
