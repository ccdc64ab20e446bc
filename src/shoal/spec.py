"""Types of groups and operations: states, kinds, reductions, dtype codes, and the description of one call.

:mod:`shoal.group` passes an :class:`Operation` to a backend.  The numeric codes are those of the native core
(``cpp/kernels/types.h``); a test compares the two.
"""

from __future__ import annotations

import difflib
import enum
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .common.formatting import counted
from .common.torch_features import premul_factor
from .errors import UsageError
from .op_kind import OpKind as OpKind

#: A :class:`ReduceOp`, its name in any case, or a value of ``torch.distributed.ReduceOp``.
ReduceOpLike: TypeAlias = Any


class TextEnum(str, enum.Enum):
    """An enumeration whose members are equal to their strings, and shown as these."""

    def __str__(self) -> str:
        return str(self.value)


class GroupState(TextEnum):
    """The state of a group on one rank: see :attr:`shoal.ProcessGroup.state`."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    ABORTED = "aborted"
    BROKEN = "broken"
    FORKED = "forked"


class FailureScope(TextEnum):
    """The extent of a failure between two members: it breaks the group, or ends messages between the two."""

    ALL = "all"
    PAIR = "pair"


class _ReductionCode(enum.IntEnum):
    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduction: one of the class attributes below, or :meth:`premul_sum`.

    ``SUM AVG PRODUCT MIN MAX BAND BOR BXOR``.  Operations with an argument ``op`` also accept the name as a
    string (``op="max"``), and reductions of torch (``torch.distributed.ReduceOp.MAX``).

    Integer AVG truncates toward zero; on bool SUM and MAX are *or*, PRODUCT and MIN are *and*; MIN and MAX
    propagate NaN.
    """

    code: int
    #: factor of this rank, for :meth:`premul_sum`
    factor: float = 1.0

    @property
    def name(self) -> str:
        """The upper-case name, e.g. ``"SUM"``."""
        return _ReductionCode(self.code).name

    @staticmethod
    def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
        """SUM of the inputs after multiplying each by the ``factor`` of its rank, rounded to its dtype.

        Args:
            factor: factor of this rank, which may differ between ranks.  Any real number, including
                infinities and NaN, or a tensor of one floating-point element on the CPU, which is read at
                once.

        Raises:
            UsageError: it is neither.
        """
        return ReduceOp(_ReductionCode.PREMUL_SUM, _factor(factor))

    @staticmethod
    def of(op: ReduceOpLike) -> ReduceOp:
        """Convert ``op`` to a reduction: a ReduceOp, its name in any case, or a ReduceOp of torch.

        Raises:
            UsageError: it is not a reduction, or it is PREMUL_SUM without its factor.
        """
        if isinstance(op, ReduceOp):
            return op
        found = _BY_NAME.get(op.lower()) if isinstance(op, str) else _of_torch(op)
        if found is not None:
            return found
        names = ", ".join(sorted(_BY_NAME))
        meant = _closest_name(op)
        raise UsageError(
            f"unknown reduction {op!r}{meant and f' (did you mean {meant!r}?)'}; expected a reduction such "
            f"as ReduceOp.SUM, of shoal or torch, or one of the names {names}"
        )

    def __repr__(self) -> str:
        if self.code == _ReductionCode.PREMUL_SUM:
            return f"ReduceOp.premul_sum({self.factor})"
        return f"ReduceOp.{self.name}"


def _of_torch(op: Any) -> ReduceOp | None:
    """The reduction of a value of ``torch.distributed.ReduceOp``; None: it is not such a value."""
    if op.__class__ not in _torch_classes:
        if not type(op).__module__.startswith("torch.") or not hasattr(getattr(op, "op", op), "__int__"):
            return None
        _torch_classes.add(type(op))
    # A torch.distributed.ReduceOp has its constant in `op`.  Reading its name takes three times as long.
    kind: Any = getattr(op, "op", op)
    if (number := int(kind)) != _ReductionCode.PREMUL_SUM:
        return _BY_NUMBER.get(number)
    if kind is op:
        raise UsageError(
            "op=PREMUL_SUM: the factor is missing; use shoal.ReduceOp.premul_sum(factor), or "
            "_make_nccl_premul_sum(factor) where the value must be torch's"
        )
    return ReduceOp.premul_sum(premul_factor(op))


def _closest_name(op: object) -> str:
    """The name of the reduction that a caller probably meant."""
    # The str of a reduction of torch is <RedOpType.SUM: 0>.
    word = op if isinstance(op, str) else getattr(op, "name", None) or str(op)
    word = str(word).rpartition(".")[2].partition(":")[0].lower()
    word = _OTHER_NAMES.get(word, word)
    return next(iter(difflib.get_close_matches(word, _BY_NAME, 1)), "")


_OTHER_NAMES = {"mean": "avg", "average": "avg", "prod": "product", "mul": "product", "add": "sum"}


def _factor(given: object) -> float:
    if isinstance(given, torch.Tensor):
        if given.numel() != 1:
            elements = counted(given.numel(), "element")
            problem = f"a tensor of {elements}, shape {tuple(given.shape)}; each rank gives one"
        elif given.device.type != "cpu":
            problem = f"a tensor on {given.device}; pass its value, factor.item(), or factor.cpu()"
        elif not given.dtype.is_floating_point:
            problem = f"a tensor of {given.dtype}; pass factor.double()"
        else:
            return float(given.detach())
    elif isinstance(given, numbers.Real) and not isinstance(given, bool):
        try:
            return float(given)
        except OverflowError:
            problem = "a whole number that no float can hold"
    else:
        problem = repr(given)
    raise UsageError(
        "the factor of PREMUL_SUM must be a real number, or a tensor of one floating-point element on the "
        f"CPU, got {problem}"
    )


SUM = ReduceOp(_ReductionCode.SUM)
AVG = ReduceOp(_ReductionCode.AVG)
PRODUCT = ReduceOp(_ReductionCode.PRODUCT)
MIN = ReduceOp(_ReductionCode.MIN)
MAX = ReduceOp(_ReductionCode.MAX)
PREMUL_SUM = ReduceOp(_ReductionCode.PREMUL_SUM)  # for inputs that are multiplied already
BAND = ReduceOp(_ReductionCode.BAND)
BOR = ReduceOp(_ReductionCode.BOR)
BXOR = ReduceOp(_ReductionCode.BXOR)
#: the reductions that have a name; PREMUL_SUM has a factor instead
REDUCTIONS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)
for _op in REDUCTIONS:
    setattr(ReduceOp, _op.name, _op)
_BY_NAME = {op.name.lower(): op for op in REDUCTIONS}
#: by the number of torch, which is the same; a test compares them
_BY_NUMBER = {op.code: op for op in REDUCTIONS}
#: known classes of torch's reductions; a cache that avoids checking names for small messages
_torch_classes: set[type] = set()


#: torch dtype -> code in the native core.  Other dtypes cannot be sent.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.float8_e4m3fnuz: 6,
    torch.float8_e5m2fnuz: 7,
    torch.int8: 8,
    torch.uint8: 9,
    torch.int16: 10,
    torch.uint16: 11,
    torch.int32: 12,
    torch.uint32: 13,
    torch.int64: 14,
    torch.uint64: 15,
    torch.bool: 16,
    torch.complex64: 17,
    torch.complex128: 18,
    torch.complex32: 19,
}
DTYPES_BY_CODE: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

# -- legal combinations of kinds, dtypes and reductions ------------------------------------------
#
# The core has the same table, for received messages (cpp/kernels/types.cc).  tests/test_legality.py compares
# this table with the kernels and with groups.

#: Kinds that reduce; all others copy, and accept every dtype.
REDUCING = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER})

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTS = (
    torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64,
)  # fmt: skip
_COMPLEX = (torch.complex64, torch.complex128)

_RING = frozenset({_ReductionCode.SUM, _ReductionCode.PRODUCT})
_MEAN = frozenset({_ReductionCode.AVG})
_SCALED = frozenset({_ReductionCode.PREMUL_SUM})
_ORDER = frozenset({_ReductionCode.MIN, _ReductionCode.MAX})
_BITS = frozenset({_ReductionCode.BAND, _ReductionCode.BOR, _ReductionCode.BXOR})

#: dtype -> codes of its legal reductions.  Other dtypes can only be copied.
LEGAL_REDUCTIONS: dict[torch.dtype, frozenset[int]] = {
    **dict.fromkeys(_FLOATS, _RING | _MEAN | _SCALED | _ORDER),
    **dict.fromkeys(_INTS, _RING | _MEAN | _ORDER | _BITS),
    **dict.fromkeys(_COMPLEX, _RING | _MEAN | _SCALED),
    torch.bool: _RING | _ORDER | _BITS,
}


def why_illegal(kind: OpKind, dtype: torch.dtype, op: ReduceOp = SUM) -> str | None:
    """Return why an operation does not accept tensors of ``dtype``; None if it does.

    Args:
        op: the reduction, for kinds that reduce.
    """
    if dtype not in DTYPE_CODES:
        return f"tensors of {dtype} cannot be sent"
    if kind not in REDUCING:
        return None
    legal = LEGAL_REDUCTIONS.get(dtype)
    if legal is None:
        return f"tensors of {dtype} can be copied but not reduced"
    if op.code in legal:
        return None
    names = sorted(_ReductionCode(code).name for code in legal)
    return (
        f"{op.name} has no meaning for {dtype}; it can be reduced with {', '.join(names[:-1])} or {names[-1]}"
    )


#: The source of a receive that accepts a message from any rank.
ANY_SOURCE = -1

#: The largest tag of a program's messages; larger tags are for internal ones.
MAX_TAG = 2**30 - 1


@dataclass(slots=True)
class Operation:
    """One validated call for a backend.  All tensors are contiguous and on the group's device.

    A backend reads ``inputs`` and writes ``outputs`` (for an in-place operation both have the same tensor).
    The tensors of an operation, for a group of ``n``, rank ``r`` and root ``q``:

    ================  ==========================================  ==================================
    kind              inputs                                      outputs
    ================  ==========================================  ==================================
    ALL_REDUCE        [x]                                         [x] (same tensor)
    REDUCE            [x]                                         [x] at q, else []
    BROADCAST         [x] at q, else []                           [x] (everywhere, same tensor at q)
    ALL_GATHER        [x]                                         n tensors, or ONE of all of them
    REDUCE_SCATTER    n tensors, or ONE of all of them            [y]
    GATHER            [x]                                         n tensors at q, else []
    SCATTER           n tensors at q, else []                     [y]
    ALL_TO_ALL        n tensors                                   n tensors
    BARRIER           []                                          []
    SEND              [x]                                         []
    RECV              []                                          [y], or [] (allocate the message)
    ================  ==========================================  ==================================

    Inputs of PREMUL_SUM are multiplied by the factor of their rank already: a backend adds them, as for SUM.

    In the ONE form (``*_single`` with equal parts) one tensor has all parts, one after another.  Tensors of
    ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER and ALL_TO_ALL may have different sizes on different ranks;
    ``sizes`` then has the number of elements of each part, the same list on all ranks.  It is not used for
    ALL_TO_ALL, where input *i* of rank *j* must be as long as output *j* of rank *i*.

    Attributes:
        kind: kind of the operation.
        number: sequence number in the group, equal on all ranks; -1 for SEND and RECV, for operations matched
            by ``key``, and for captured ones.
        key: 0, or a 64-bit key that replaces the number for operations issued in a callback.
        timeout: seconds from submission until the operation breaks the group, or, in a group with
            ``scope="pair"``, only fails itself.
        root, peer, tag: numbered in the group; peer may be ANY_SOURCE for RECV.
    """

    kind: OpKind
    number: int
    key: int
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    timeout: float
    op: ReduceOp = SUM
    root: int = -1
    peer: int = -1
    tag: int = 0
    sizes: Sequence[int] = ()

    @property
    def result(self) -> torch.Tensor | list[torch.Tensor] | None:
        """The value of the future of a collective; see ``DataChannel.submit``."""
        outputs = self.outputs
        return None if not outputs else outputs[0] if len(outputs) == 1 else list(outputs)

    @property
    def captured(self) -> bool:
        """Whether a graph of a device captures the operation, and runs it at each replay."""
        return self.number < 0 and not self.key and self.kind not in (OpKind.SEND, OpKind.RECV)
