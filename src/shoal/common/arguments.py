"""Errors for unknown keyword arguments that suggest the correct one, and checks of numbers.

Python's own error names an internal function.  Torch has other names for some arguments, and takes a
``timedelta`` where shoal takes seconds.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

#: torch's name -> names of shoal; the first one that the function takes is suggested
_TORCH_NAMES = {
    "world_size": ("size",),
    "init_method": ("url",),
    "group_name": ("name",),
    "job_id": ("job",),
    "process_group": ("group",),
    "pg": ("group",),
    "src": ("root",),
    "dst": ("root",),
    "group_src": ("root", "src"),
    "group_dst": ("root", "dst"),
    "tensor": ("x", "out"),
    "input": ("x", "inputs"),
    "input_tensor": ("x",),
    "output": ("out",),
    "output_tensor": ("out",),
    "tensor_list": ("out", "inputs"),
    "output_tensor_list": ("out",),
    "gather_list": ("out",),
    "scatter_list": ("inputs",),
    "input_list": ("inputs",),
    "input_tensor_list": ("inputs",),
    "input_split_sizes": ("input_splits",),
    "output_split_sizes": ("output_splits",),
    "object_list": ("obj", "objs"),
    "scatter_object_input_list": ("objs",),
    "reduce_op": ("op",),
    "bucket_cap": ("bucket_cap_mb",),
    "forward_sync_buffers": ("broadcast_buffers",),
}
_ON_A_GROUP = "the operation is a method of its group, as in group.all_reduce(x)"
#: torch's name -> the explanation if the function has no corresponding argument
_EXPLANATIONS = {
    "async_op": "every operation returns a future at once, and future.wait() waits for it",
    "group": _ON_A_GROUP,
    "process_group": _ON_A_GROUP,
    "pg_options": "options of the backend are separate keywords, such as transport='tcp'",
    "batched_grad_copy": "each gradient is copied into its bucket as soon as it is computed: leave it out",
    "bucket_cap_mb_list": "all buckets have the limit bucket_cap_mb",
    "device_mesh": "pass the group of one of its dimensions, as in group=mesh.get_group('replicas')",
    "check_reduction": "torch's class ignores it too: leave it out",
    "device_id": "the group takes CPU tensors: leave it out",
    "device_ids": "the group takes CPU tensors: leave it out",
    "is_first_joinable": "the first one of joinables represents all",
    "wait_all_ranks": "monitored_barrier always names all missing ranks",
}


def unknown_keyword_error(where: str, unknown: Iterable[str], known: Sequence[str]) -> UsageError:
    """Return the error for keyword arguments that a function does not take; it names the first one.

    ``where`` is the beginning of the message: the public name of the function, and the rank if there is one.
    """
    name = next(iter(unknown))
    text = f"{where} takes no argument {name!r}"
    renamed = next((other for other in _TORCH_NAMES.get(name, ()) if other in known), None)
    near = renamed or next(iter(difflib.get_close_matches(name, known, 1)), None)
    if renamed is None and name in _EXPLANATIONS:
        text += f": {_EXPLANATIONS[name]}"
    elif near is not None:
        text += f" (did you mean {near!r}?)"
    return UsageError(f"{text}.  It takes {', '.join(known)}")


def keyword_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments of ``function`` that can be passed by name, not counting ``**kwargs``."""
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self"
    )


def accepted_keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the keywords of a function or of the constructor of a class; None: any, or unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return keyword_names(function)


def explain_unknown_keywords(where: Callable[..., str]) -> Callable[[F], F]:
    """Decorate a function: replace Python's TypeError for an unknown keyword with a helpful message.

    ``where`` returns its beginning, given the function's name and positional arguments.  This adds about
    100 ns to a call, too much for operations on small messages.
    """

    def decorate(function: F) -> F:
        names = accepted_keywords(function)
        assert names is not None, "a function that takes any keyword has nothing to refuse"
        accepted = frozenset(names)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if unknown := [name for name in kwargs if name not in accepted]:
                raise unknown_keyword_error(where(function.__name__, *args), unknown, names)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def accept_both_group_names(cls: C) -> C:
    """Decorate a class: its constructor takes both ``group=`` and ``process_group=``, torch's name."""
    construct = cls.__init__  # type: ignore[misc]
    names = ("group", "process_group")
    name, other = names if names[0] in inspect.signature(construct).parameters else reversed(names)

    @functools.wraps(construct)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        if other in kwargs:
            if name in kwargs:
                raise UsageError(f"{cls.__name__}: pass either group= or process_group=, not both")
            kwargs[name] = kwargs.pop(other)
        construct(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def checked_count(name: str, value: Any) -> int:
    """Return ``value`` if it is a positive integer; raise UsageError if not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}={value!r}: expected a whole number from 1")
    return value


def checked_seconds(name: str, value: Any, where: str = "", *, finite: bool = False) -> float:
    """Return ``value`` if it is a positive number of seconds (if ``finite``, not infinity); else UsageError.

    ``where`` follows the value in the message, such as ``" on rank 3"``.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and value > 0 and (value < math.inf or not finite):
        return float(value)
    hint = "; pass its total_seconds()" if isinstance(value, timedelta) else ""
    raise UsageError(f"{name}={value!r}{where}: expected a positive number of seconds{hint}")
