"""Checks of the arguments of one call.

The checks have no side effects, so the group stays usable after a refused call.  Every message names the
rank, the operation, and the expected and the given argument.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ...common.formatting import counted
from ...errors import UnsupportedOperation, UsageError
from ...spec import DTYPE_CODES, MAX_TAG, OpKind, ReduceOp, ReduceOpLike, why_illegal
from .overlap import SearchLimitExceeded, overlapping_pair, overlaps_itself

#: The largest number of elements of a tensor: its length in bytes fits in a message with any dtype.
MAX_COUNT = 2**63 // 16 - 1


@dataclass(frozen=True, slots=True)
class OperationCall:
    """One operation of a group, with the checks of its arguments; every message begins with its name."""

    name: str
    rank: int
    size: int
    devices: frozenset[str]

    def refuse(self, problem: str, error: type[UsageError] = UsageError) -> NoReturn:
        raise error(f"{self.name} on rank {self.rank}: {problem}")

    # -- tensors -------------------------------------------------------------------------------

    def tensor(self, x: torch.Tensor, what: str) -> None:
        """Check that ``x`` is a dense tensor with memory, a dtype that can be sent, and a valid device."""
        if not isinstance(x, torch.Tensor):
            self.refuse(f"{what} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            self.refuse(
                f"{what} must be a dense tensor, got layout {layout}; send its parts (such as its indices "
                "and values), or x.to_dense()",
                UnsupportedOperation,
            )
        if x.dtype not in DTYPE_CODES:
            self.refuse(f"{what} has dtype {x.dtype}, which cannot be sent", UnsupportedOperation)
        if not (x.is_cpu and "cpu" in self.devices):
            self.device(x.device, f"{what} is on")
        if x.__class__ is not torch.Tensor:
            if not has_memory(x):
                self.refuse(
                    f"{what} is a {type(x).__name__}, which has no memory of its own; pass the tensor that "
                    "it wraps (x.to_local() of a DTensor)",
                    UnsupportedOperation,
                )
        elif not has_address(x):
            self.refuse(
                f"{what} has no memory of its own: its storage was freed (as that of a sharded parameter is) "
                "or it is a wrapper inside a transform such as vmap; pass a tensor with values",
                UnsupportedOperation,
            )

    def device(self, device: torch.device, what: str) -> None:
        """Check that the group takes tensors on ``device``; ``what`` begins the error message."""
        if device.type not in self.devices:
            self.refuse(
                f"{what} {device}, but the group takes tensors on {_listed(sorted(self.devices))}; copy the "
                f"tensor there, or create the group with a backend for {device.type} (in torch.distributed: "
                f'"cpu:shoal,{device.type}:<backend>")'
            )

    def output(self, x: torch.Tensor, what: str) -> None:
        """Check that ``x`` is a tensor that can be written to: its elements do not share memory."""
        self.tensor(x, what)
        if x.is_contiguous():
            return
        layout = f"{what} (shape {tuple(x.shape)}, stride {x.stride()})"
        try:
            overlaps = overlaps_itself(x)
        except SearchLimitExceeded:
            self.refuse(
                f"{layout} has a layout for which it takes too long to find out whether elements share an "
                "address; pass x.contiguous()"
            )
        if overlaps:
            self.refuse(
                f"{layout} has several elements at one address, as expanded tensors do, and cannot be "
                "written to; pass x.contiguous()"
            )

    def tensors(self, xs: Sequence[torch.Tensor], what: str, *, outputs: bool = False) -> None:
        """Check that ``xs`` is a sequence of one tensor per rank, with one dtype; outputs share no memory."""
        if isinstance(xs, torch.Tensor) or not isinstance(xs, Sequence):
            self.refuse(f"{what} must be a list of {counted(self.size, 'tensor')}, got {type(xs).__name__}")
        if len(xs) != self.size:
            self.refuse(
                f"{what} must be a list of {counted(self.size, 'tensor')}, one per rank, got {len(xs)}"
            )
        for i, x in enumerate(xs):
            (self.output if outputs else self.tensor)(x, f"{what}[{i}]")
            self.same_dtype(x, f"{what}[{i}]", xs[0], f"{what}[0]")
        if outputs and (pair := overlapping_pair(xs)):
            self.refuse(
                f"{what}[{pair[0]}] and {what}[{pair[1]}] lie in the same memory; every rank's part needs "
                f"a tensor of its own ([torch.empty(...)] * {self.size} makes only one)"
            )

    def same_dtype(self, x: torch.Tensor, what: str, y: torch.Tensor, other: str) -> None:
        if x.dtype is not y.dtype:
            self.refuse(f"{what} has dtype {x.dtype}, but {other} has {y.dtype}; they must be equal")

    def count(self, x: torch.Tensor, what: str, expected: int, why: str) -> None:
        """Check that ``x`` has ``expected`` elements; ``why`` is the reason for that number."""
        if x.numel() != expected:
            self.refuse(f"{what} has {counted(x.numel(), 'element')}, expected {expected} ({why})")

    def reduction(self, op: ReduceOpLike, dtype: torch.dtype) -> ReduceOp:
        """Return the reduction ``op``, if it is defined for ``dtype``."""
        reduction = ReduceOp.of(op)
        problem = why_illegal(OpKind.ALL_REDUCE, dtype, reduction)
        if problem is not None:
            self.refuse(problem, UnsupportedOperation)
        return reduction

    # -- numbers -------------------------------------------------------------------------------

    def root(self, root: int, what: str = "root") -> int:
        """Check that ``root`` is a rank of the group."""
        if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < self.size:
            self.refuse(f"{what} must be a rank of the group, 0 to {self.size - 1}, got {root!r}")
        return root

    def named_root(self, root: int, name: str, given: int | None) -> int:
        """Return the root, which may be ``given`` under torch's ``name`` for it."""
        if given is not None and root not in (0, given):
            self.refuse(f"root={root!r} and {name}={given!r} are two names of one rank; give one of them")
        return self.root(root) if given is None else self.root(given, name)

    def peer(self, peer: int, what: str) -> int:
        """Check that ``peer`` is another rank of the group."""
        self.root(peer, what)
        if peer == self.rank:
            self.refuse(f"{what} is this rank itself, {peer}; a message needs two ranks")
        return peer

    def tag(self, tag: int) -> int:
        if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag <= MAX_TAG:
            self.refuse(f"tag must be an integer from 0 to {MAX_TAG}, got {tag!r}")
        return tag

    def sizes(self, sizes: Sequence[int] | None, own: int, what: str) -> list[int]:
        """Return the number of elements of every rank's part: ``sizes``, or ``own`` for all."""
        if sizes is None:
            return [own] * self.size
        counts = self.counts(sizes, "sizes")
        if counts[self.rank] != own:
            self.refuse(
                f"{what} has {counted(own, 'element')}, but sizes[{self.rank}] is {counts[self.rank]}"
            )
        return counts

    def splits(self, splits: Sequence[int] | None, x: torch.Tensor, what: str) -> list[int]:
        """Return the lengths of the ranks' parts along the first dimension of ``x``."""
        if x.dim() == 0:
            self.refuse(f"{what} must have at least one dimension, along which it is split")
        if splits is None:
            if x.shape[0] % self.size:
                self.refuse(
                    f"the first dimension of {what} is {x.shape[0]}, which is not divisible by {self.size} "
                    f"ranks; pass {what}_splits"
                )
            return [x.shape[0] // self.size] * self.size
        parts = self.counts(splits, f"{what}_splits")
        if sum(parts) != x.shape[0]:
            self.refuse(
                f"{what}_splits add up to {sum(parts)}, but the first dimension of {what} is {x.shape[0]}"
            )
        return parts

    def counts(self, values: Sequence[int], what: str) -> list[int]:
        try:
            counts = [operator.index(value) for value in values]
        except TypeError:
            self.refuse(f"{what} must be {self.size} integers, one per rank, got {values!r}")
        if len(counts) != self.size or any(count < 0 for count in counts):
            self.refuse(f"{what} must be {self.size} counts, one per rank and none negative, got {counts}")
        if any(count > MAX_COUNT for count in counts):
            self.refuse(f"{what} must be counts of elements that fit in memory, got {counts}")
        return counts


#: Operations with a warning that was already shown.
_warned: set[str] = set()


def warn_of_gradients(call: OperationCall) -> None:
    """Warn, once for each operation, that gradients do not flow through it."""
    if call.name in _warned or not torch.is_grad_enabled():
        return
    _warned.add(call.name)
    variant = call.name if call.name in _DIFFERENTIABLE else "all_reduce"
    warnings.warn(
        f"{call.name} on rank {call.rank}: a tensor requires grad, and gradients do not flow through this "
        f"operation.  Use shoal.functional.{variant}, through which they do, or pass x.detach() (or call it "
        "under torch.no_grad()).  This is shown once",
        stacklevel=_depth_of_program(),
    )


def _depth_of_program() -> int:
    """Return the ``stacklevel``, for the caller, of the innermost frame outside shoal."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("shoal."):
        level, frame = level + 1, frame.f_back
    return level


#: the operations of shoal.functional
_DIFFERENTIABLE = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_to_all_single"}
)


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` has memory on its device; false for wrapper subclasses and fake tensors."""
    return x.untyped_storage().device.type == x.device.type and has_address(x)


def has_address(x: torch.Tensor) -> bool:
    """Whether ``x`` has an address; false if its storage was freed, or in a transform such as vmap."""
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:
        return False


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
