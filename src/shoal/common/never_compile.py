"""Excludes the package's own code from torch.compile.

While compiled code runs, torch tries to compile every Python function that is called, including those called
from C++: autograd hooks and callbacks, methods of backends, dispatch.  Functions of shoal call the native
module and other ranks, which cannot be traced.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Target = TypeVar("_Target", bound=Any)


def never_compile(target: _Target) -> _Target:
    """Never compile a function, or the methods of a class and of its bases, nor functions that they call.

    A call in compiled code is a graph break.  Unlike ``torch.compiler.disable``, this neither wraps functions
    nor imports the compiler.
    """
    if isinstance(target, type):
        for base in target.__mro__:
            if base.__module__.startswith("shoal."):
                for member in vars(base).values():
                    for function in _functions_of(member):
                        _skip(function)
    else:
        _skip(target)
    return target


def _functions_of(member: object) -> list[FunctionType]:
    parts: tuple[object, ...] = (member,)
    if isinstance(member, (classmethod, staticmethod)):
        parts = (member.__func__,)
    elif isinstance(member, property):
        parts = (member.fget, member.fset)
    return [part for part in parts if isinstance(part, FunctionType)]


def _skip(function: Any) -> None:
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # the mark that torch.compiler.disable() sets
