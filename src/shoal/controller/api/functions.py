"""``Master.call`` and ``Master.load``: user functions and loaders on nodes, in the order of the log."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...common.containers import Tree, map_leaves
from ...common.copy_refusal import refuses_copies
from ...common.formatting import describe_error
from ...common.never_compile import never_compile
from ...errors import RemoteOpError, ShoalError, UsageError
from ..commands.interrupts import call_without_interrupt
from ..commands.origin import current_origin, format_origin
from ..commands.space import Space
from ..node import loader as node_loader
from ..node.functions import pickled_with, unpickled_with
from ..protocol.commands import CALL, DROP, TAKE
from ..protocol.metadata import metadata
from ..protocol.workers import node_name
from ..tensor.tensor import RemoteTensor, wrap
from .place import Place

_numbers = itertools.count()
#: calls interrupted by Ctrl-C before their results were taken or dropped
_interrupted_calls: deque[tuple[Space, int]] = deque()


@refuses_copies("a pending call on a node", "its result on the node", "Call result() and copy the result")
class PendingFunction:
    """A call that was sent to a node; `space` is the node's space."""

    _dropped = True

    def __init__(self, space: Space, payload: bytes) -> None:
        while _interrupted_calls:
            _drop(*_interrupted_calls.popleft())
        self.space = space
        self._number = next(_numbers) % 2**32
        self._dropped = False
        self._wait = space.asked(CALL, payload, self._number)

    @never_compile
    def __del__(self) -> None:
        if not self._dropped:  # after a Ctrl-C; the garbage collector may run in any thread
            _interrupted_calls.append((self.space, self._number))

    def result(self) -> Any:
        """Wait for the result of the function, and return it or raise; tensors in it stay on the node."""
        space = self.space
        tensors: list[RemoteTensor] = []

        def take() -> None:  # not interruptible: an id without a handle would never be freed
            with space.lock:
                for position, each in enumerate(described):
                    id = space.make(TAKE, self._number, position)
                    tensors.append(wrap(space, id, metadata(space.device, each)))
                if space.ordering is not None:
                    space.ordering.fenced(space)

        try:
            pickled, described = self._wait()
            call_without_interrupt(take)
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


def pickle_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], spaces: Sequence[Space]
) -> bytes:
    """Pickle a function and its arguments for the nodes of `spaces`; tensors on nodes become space and id.

    Raises `UsageError` if a tensor is on another node or an argument cannot be pickled.
    """
    nodes = {space.connections[0].index for space in spaces}

    def name(value: Any) -> tuple[int, int] | None:
        if type(value) is not RemoteTensor:
            return None
        space = value.handle.space
        if not nodes <= {connection.index for connection in space.connections}:
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
    payload = pickle_call(fn, args, kwargs, spaces)
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


def load(place: Place, make: Callable[[int, int], Iterable[Any]]) -> Iterator[Any]:
    """Iterate over the batches of a loader on each node of a place."""
    spaces = place.space.parts
    name = secrets.token_hex(8)
    follow = pickle_call(node_loader.following, (name,), {}, spaces)
    asked: list[deque[PendingFunction]] = [deque() for _ in spaces]
    begun = []
    try:
        for index, space in enumerate(spaces):
            begun.append(space)
            payload = pickle_call(node_loader.begin, (name, make, index, len(spaces)), {}, (space,))
            PendingFunction(space, payload).drop()
        for _ in range(node_loader.PREFETCH_BATCHES):
            for each, space in zip(asked, spaces, strict=True):
                each.append(PendingFunction(space, follow))
        while True:
            found = [each.popleft().result() for each in asked]
            for space, each in zip(spaces, found, strict=True):
                if each[0] == "failed":
                    raise _loader_error(space.connections[0].index, *each[1:])
            if any(each[0] == "end" for each in found):
                return
            for each, space in zip(asked, spaces, strict=True):
                each.append(PendingFunction(space, follow))
            batches = [each[1] for each in found]
            yield _on_device(place.space, batches[0] if len(batches) == 1 else _join_batches(place, batches))
    finally:
        for pending in asked:
            for one in pending:
                one.drop()
        for space in begun:
            with contextlib.suppress(ShoalError):  # the next use of a lost node raises it
                PendingFunction(space, pickle_call(node_loader.stop, (name,), {}, (space,))).drop()


def _loader_error(index: int, error: str, traceback: str) -> RemoteOpError:
    line = format_origin(current_origin())
    return RemoteOpError(
        f"node {index}: a loader failed: {error}\nread at {line}\nthe traceback there:\n{traceback}",
        node_name(index), traceback, line,
    )  # fmt: skip


def _on_device(space: Space, batch: Any) -> Any:
    """Move a batch to the device where the nodes create tensors."""
    if space.within < 0:
        return batch
    return map_leaves(lambda each: each.within(space.within) if type(each) is RemoteTensor else each, batch)


def _join_batches(place: Place, batches: list[Any]) -> Any:
    """Join the nodes' batches: tensors become tensors on the place, other values are the first node's."""

    def joined(*parts: Any) -> Any:
        return place.scatter(parts) if isinstance(parts[0], torch.Tensor) else parts[0]

    trees = [Tree(batch) for batch in batches]
    for index, tree in enumerate(trees):
        if tree.form != trees[0].form:
            raise UsageError(
                "load: the loaders returned batches of different structures: "
                f"{trees[0]} at position 0 of the place, and {tree} at position {index}"
            )
    return trees[0].build([joined(*parts) for parts in zip(*(tree.leaves for tree in trees), strict=True)])
