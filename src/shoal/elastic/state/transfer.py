"""Transfer of the state from the ranks that hold it to the ranks that have joined.

Pieces are striped over the holders, to use all connections: piece i is sent by holder i modulo their number.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...common.containers import Tree, is_tensor
from ...common.tensor_bytes import TensorBytes, plain_memory
from ...errors import StateDiverged
from ...future import Future
from ...group import ProcessGroup
from .state import State
from .values import is_plain_tensor

#: bytes of a piece
PIECE = 4 << 20
_LENGTH, _SKELETON, _FIRST = 0, 1, 2  # tags


def send_state(state: State, group: ProcessGroup, holders: Sequence[int], newcomers: Sequence[int]) -> None:
    """Send this rank's share of the pieces to all ranks that have joined."""
    tree = _tree(state.content(shared=True))
    tensors = list(filter(_is_sent_in_pieces, tree.leaves))
    waits: list[Future[Any]] = []
    if group.rank == holders[0]:
        raw = io.BytesIO()
        torch.save(
            tree.build([leaf.to("meta") if _is_sent_in_pieces(leaf) else leaf for leaf in tree.leaves]), raw
        )
        skeleton = torch.frombuffer(bytearray(raw.getbuffer()), dtype=torch.uint8)
        for rank in newcomers:
            waits.append(group.send(torch.tensor([skeleton.numel()], device="cpu"), rank, _LENGTH))
            waits.append(group.send(skeleton, rank, _SKELETON))
    for number, piece in enumerate(_pieces(tensors)):
        if holders[number % len(holders)] == group.rank:
            waits += [group.send(piece, rank, _FIRST + number) for rank in newcomers]
    for each in waits:
        each.wait()


def receive_state(state: State, group: ProcessGroup, holders: Sequence[int]) -> None:
    """Receive all pieces and load the state; raises StateDiverged if this rank's State has other parts."""
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    group.recv(length, holders[0], _LENGTH).wait()
    raw = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    group.recv(raw, holders[0], _SKELETON).wait()
    with TensorBytes(raw) as view:
        skeleton = torch.load(io.BytesIO(view), weights_only=True)
    tree = _allocate_tensors(skeleton, state.content(shared=True))
    waits = [
        group.recv(piece, holders[number % len(holders)], _FIRST + number)
        for number, piece in enumerate(_pieces(list(filter(_is_sent_in_pieces, tree.leaves))))
    ]
    for each in waits:
        each.wait()
    try:
        state.take_over(tree.build(tree.leaves), "the session that this process joined")
    except (KeyError, ValueError, RuntimeError) as error:
        raise StateDiverged(
            f"rank {group.rank} joined with another State than that of the others: {error}.  Every rank must "
            "make the same State, before the session"
        ) from error


def _tree(content: Any) -> Tree:
    """Flatten the content; sets are leaves, because ranks iterate over them in different orders."""
    return Tree(content, lambda value: type(value) in (set, frozenset))


def _allocate_tensors(skeleton: dict[str, Any], mine: dict[str, Any]) -> Tree:
    """Return ``skeleton`` with memory for its tensors, reusing ``mine`` in parts with the same structure."""
    own: dict[int, Any] = {}
    for name, part in skeleton["parts"].items():
        theirs, ours = _tree(part), _tree(mine["parts"].get(name))
        if theirs.form == ours.form:
            own.update((id(a), b) for a, b in zip(theirs.leaves, ours.leaves, strict=True))
    tree, used = _tree(skeleton), set[int]()
    filled = [
        _reusable_tensor(leaf, own.get(id(leaf)), used) if is_tensor(leaf) and leaf.is_meta else leaf
        for leaf in tree.leaves
    ]
    return _tree(tree.build(filled))


def _reusable_tensor(described: torch.Tensor, mine: Any, used: set[int]) -> torch.Tensor:
    """Return ``mine`` if it matches ``described`` and can be received into, else a new tensor.

    ``used`` has the addresses of tensors that are received into; that of ``mine`` is added.
    """
    if (
        _is_sent_in_pieces(mine)
        and (mine.shape, mine.dtype) == (described.shape, described.dtype)
        and mine.device.type == "cpu"
        and mine.is_contiguous()
        and not (mine.is_conj() or mine.is_neg())
        and mine.data_ptr() not in used
    ):
        used.add(mine.data_ptr())
        return mine  # type: ignore[no-any-return]
    return torch.empty(described.shape, dtype=described.dtype, device="cpu")


def _is_sent_in_pieces(value: Any) -> bool:
    """Whether ``value`` is a tensor that is sent in pieces; other values are part of the skeleton."""
    return is_tensor(value) and not value.requires_grad and (value.is_meta or is_plain_tensor(value))


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of all tensors in pieces, as views where possible."""
    for tensor in tensors:
        plain = plain_memory(tensor)
        if plain.numel():
            raw = plain.view(-1).view(torch.uint8)
            yield from (raw[start : start + PIECE] for start in range(0, raw.numel(), PIECE))
