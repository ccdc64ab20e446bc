"""``Master.call``: a function of the program, run on a node on the real tensors, in the order of the log."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...common.copy_refusal import refuses_copies
from ...common.uncompiled import uncompiled
from ...common.wording import in_words
from ...errors import ShoalError, UsageError
from ..commands.interrupts import undisturbed
from ..commands.space import Space
from ..node.functions import pickled_with, unpickled_with
from ..protocol.commands import CALL, DROP, TAKE
from ..protocol.metadata import metadata
from ..tensor.tensor import RemoteTensor, wrap

_numbers = itertools.count()
#: calls that a Ctrl-C has ended before their results were taken or dropped
_left: deque[tuple[Space, int]] = deque()


@refuses_copies(
    "a call of a node",
    "its result at the node",
    "Call result() and copy that",
)
class PendingFunction:
    """A call that a node has been sent.

    Attributes:
        space: of the node.
    """

    _dropped = True

    def __init__(self, space: Space, payload: bytes) -> None:
        while _left:
            _drop(*_left.popleft())
        self.space = space
        self._number = next(_numbers) % 2**32
        self._dropped = False
        self._wait = space.asked(CALL, payload, self._number)

    @uncompiled
    def __del__(self) -> None:
        if not self._dropped:  # after a Ctrl-C, in whatever thread the garbage collector runs
            _left.append((self.space, self._number))

    def result(self) -> Any:
        """Wait for what the function gave; tensors in it stay on the node.

        Raises:
            RemoteOpError: the function failed, or an argument could not be computed.
            NodeLost: the node died.
        """
        space = self.space
        tensors: list[RemoteTensor] = []

        def take() -> None:  # or what is taken would have an id, and no handle that frees it
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
        """Let the node forget tensors of the result that were not taken, or will not be."""
        _drop(self.space, self._number)
        self._dropped = True


def _drop(space: Space, number: int) -> None:
    with contextlib.suppress(ShoalError):  # a lost node has forgotten them
        space.send(DROP, number)


def payload_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], spaces: Sequence[Space]
) -> bytes:
    """A function and its arguments, as the nodes of all these spaces take it; tensors of nodes by their ids.

    Raises:
        UsageError: a tensor is on another node, or something cannot be pickled.
    """
    nodes = {space.lines[0].index for space in spaces}

    def name(value: Any) -> tuple[int, int] | None:
        if type(value) is not RemoteTensor:
            return None
        space = value.handle.space
        if not nodes <= {line.index for line in space.lines}:
            where = ", ".join(f"node:{each}" for each in sorted(nodes))
            raise UsageError(f"call on {where} of a tensor on {value.device}: move it there first")
        return space.number, value.handle.id

    try:
        return pickled_with((fn, tuple(args), kwargs), name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"call: {fn!r} or an argument of it cannot be pickled: {in_words(error)}") from error


def call(spaces: Sequence[Space], fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on nodes; what it gave, on several nodes a list."""
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
