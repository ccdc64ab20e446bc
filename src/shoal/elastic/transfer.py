"""The state of a training on its way from the ranks that hold it to those that do not.

Each rank that holds it sends its share of the pieces to each newcomer, so that all their connections are in
use: piece i comes from the holder i modulo their number, as in striped file systems.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import StateDiverged
from ..future import Future
from ..group import ProcessGroup
from ..tensor_bytes import TensorBytes, plain_memory
from .state import State

#: bytes of a piece
PIECE = 4 << 20
_LENGTH, _SKELETON, _FIRST = 0, 1, 2  # tags


def send_state(state: State, group: ProcessGroup, holders: Sequence[int], newcomers: Sequence[int]) -> None:
    """Send this holder's pieces to all newcomers."""
    content = state.content(shared=True)
    tensors = list(_tensors(content))
    waits: list[Future[Any]] = []
    if group.rank == holders[0]:
        raw = io.BytesIO()
        torch.save(_mapped(content, lambda tensor: tensor.to("meta")), raw)
        skeleton = torch.frombuffer(bytearray(raw.getbuffer()), dtype=torch.uint8)
        for rank in newcomers:
            waits.append(group.send(torch.tensor([skeleton.numel()]), rank, _LENGTH))
            waits.append(group.send(skeleton, rank, _SKELETON))
    for number, piece in enumerate(_pieces(tensors)):
        if holders[number % len(holders)] == group.rank:
            waits += [group.send(piece, rank, _FIRST + number) for rank in newcomers]
    for each in waits:
        each.wait()


def receive_state(state: State, group: ProcessGroup, holders: Sequence[int]) -> None:
    """Receive all pieces and take the state over.

    Raises:
        StateDiverged: this rank has made a state with other parts.
    """
    length = torch.empty(1, dtype=torch.int64)
    group.recv(length, holders[0], _LENGTH).wait()
    raw = torch.empty(int(length), dtype=torch.uint8)
    group.recv(raw, holders[0], _SKELETON).wait()
    with TensorBytes(raw) as view:
        skeleton = torch.load(io.BytesIO(view), weights_only=True)
    content = _filled(skeleton, state.content(shared=True))
    waits = [
        group.recv(piece, holders[number % len(holders)], _FIRST + number)
        for number, piece in enumerate(_pieces(list(_tensors(content))))
    ]
    for each in waits:
        each.wait()
    try:
        state.take_over(content, "the session that this process joined")
    except (KeyError, ValueError, RuntimeError) as error:
        raise StateDiverged(
            f"rank {group.rank} joined with another State than that of the others: {error}.  Every rank must "
            "make the same State, before the session"
        ) from error


def _filled(skeleton: Any, mine: Any) -> Any:
    """``skeleton`` with memory for its tensors: that of a tensor of ``mine`` where one fits."""
    if isinstance(skeleton, torch.Tensor):
        alike = isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype) == (
            skeleton.shape,
            skeleton.dtype,
        )
        if alike and mine.device.type == "cpu" and mine.is_contiguous() and not mine.is_conj():
            return mine
        return torch.empty(skeleton.shape, dtype=skeleton.dtype)
    if isinstance(skeleton, dict):
        inside = mine if isinstance(mine, dict) else {}
        same = copy.copy(skeleton)  # with what modules note beside their entries
        same.update({key: _filled(each, inside.get(key)) for key, each in skeleton.items()})
        return same
    if isinstance(skeleton, (list, tuple)):
        others = (
            mine if isinstance(mine, (list, tuple)) and len(mine) == len(skeleton) else [None] * len(skeleton)
        )
        return type(skeleton)([_filled(*pair) for pair in zip(skeleton, others, strict=True)])
    return skeleton


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all tensors, in pieces; views where that is possible."""
    for tensor in tensors:
        plain = plain_memory(tensor)
        if plain.numel():
            raw = plain.view(-1).view(torch.uint8)
            yield from (raw[start : start + PIECE] for start in range(0, raw.numel(), PIECE))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in dicts, lists and tuples, in the order of :func:`_mapped`."""
    if isinstance(value, torch.Tensor):
        return iter([value])
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return itertools.chain.from_iterable(map(_tensors, inside))


def _mapped(value: Any, fn: Any) -> Any:
    """The same with ``fn`` of each tensor."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        same = copy.copy(value)  # with what modules note beside their entries
        same.update({key: _mapped(each, fn) for key, each in value.items()})
        return same
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(each, fn) for each in value])
    return value
