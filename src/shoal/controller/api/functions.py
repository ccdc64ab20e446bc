"""``Master.call``: runs a user-defined function on a node, on the node's tensors, in the order of the log."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...common.copy_refusal import refuses_copies
from ...common.formatting import describe_error
from ...common.never_compile import never_compile
from ...errors import ShoalError, UsageError
from ..commands.interrupts import undisturbed
from ..commands.space import Space
from ..node.functions import pickled_with, unpickled_with
from ..protocol.commands import CALL, DROP, TAKE
from ..protocol.metadata import metadata
from ..tensor.tensor import RemoteTensor, wrap

_numbers = itertools.count()
#: calls interrupted by Ctrl-C before their results were taken or dropped
_left: deque[tuple[Space, int]] = deque()


@refuses_copies(
    "a pending call on a node",
    "its result on the node",
    "Call result() and copy the result",
)
class PendingFunction:
    """A call that was sent to a node; `space` is the node's space."""

    _dropped = True

    def __init__(self, space: Space, payload: bytes) -> None:
        while _left:
            _drop(*_left.popleft())
        self.space = space
        self._number = next(_numbers) % 2**32
        self._dropped = False
        self._wait = space.asked(CALL, payload, self._number)

    @never_compile
    def __del__(self) -> None:
        if not self._dropped:  # after a Ctrl-C; the garbage collector may run in any thread
            _left.append((self.space, self._number))

    def result(self) -> Any:
        """Wait for the result of the function, and return it or raise; tensors in it stay on the node."""
        space = self.space
        tensors: list[RemoteTensor] = []

        def take() -> None:  # not interruptible: an id without a handle would never be freed
            with space.lock:
                for position, each in enumerate(told):
                    id = space.take(TAKE, self._number, position)
                    tensors.append(wrap(space, id, metadata(space.device, each)))

        try:
            pickled, told = self._wait()
            undisturbed(take)
        finally:
            self.drop()
        return unpickled_with(pickled, tensors.__getitem__)

    def drop(self) -> None:
        """Release the result's tensors on the node, except those already taken."""
        _drop(self.space, self._number)
        self._dropped = True


def _drop(space: Space, number: int) -> None:
    with contextlib.suppress(ShoalError):  # a lost node has no results left
        space.send(DROP, number)


def payload_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], spaces: Sequence[Space]
) -> bytes:
    """Pickle a function and its arguments for the nodes of `spaces`; tensors on nodes become space and id.

    Raises `UsageError` if a tensor is on another node or an argument cannot be pickled.
    """
    nodes = {space.lines[0].index for space in spaces}

    def name(value: Any) -> tuple[int, int] | None:
        if type(value) is not RemoteTensor:
            return None
        space = value.handle.space
        if not nodes <= {line.index for line in space.lines}:
            where = ", ".join(f"node:{each}" for each in sorted(nodes))
            raise UsageError(
                f"call on {where}: an argument is a tensor on {value.device}; move it there first"
            )
        return space.number, value.handle.id

    try:
        return pickled_with((fn, tuple(args), kwargs), name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"call: {fn!r} or an argument of it cannot be pickled: {describe_error(error)}"
        ) from error


def call(spaces: Sequence[Space], fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on nodes; return its result, for several nodes a list of results."""
    payload = payload_of(fn, args, kwargs, spaces)
    pending = [PendingFunction(space, payload) for space in spaces]
    results, errors = [], []
    for each in pending:
        try:
            results.append(each.result())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results if len(spaces) > 1 else results[0]
