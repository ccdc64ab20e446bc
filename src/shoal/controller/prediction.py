"""What an operator gives, by its metadata alone: torch's fake tensors stand for those of a node."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from ..errors import UnsupportedOperation
from .commands import Template
from .metadata import Metadata, Told, told

#: what tells that only the node knows
_ASK = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
#: operators of which torch's metadata is wrong: the loss of one sample, and weights that are not needed
_MISTAKEN = frozenset(
    {
        torch.ops.aten.multilabel_margin_loss_forward.default,
        torch.ops.aten._native_multi_head_attention.default,
    }
)
#: operators whose results may be anywhere in the storage: whether they leave it, only its node knows
_ANYWHERE = frozenset({torch.ops.aten.as_strided, torch.ops.aten.as_strided_})
#: bytes of a storage that none is larger than
_LARGEST = 2**60


class Prediction(NamedTuple):
    """What a call gives.

    Attributes:
        returned: its shape: ("new", slot), ("operand", position), ("constant", value), or ("list", [...]) and
            ("tuple", [...]) of these.
        results: metadata of the new tensors.
        paths: where they are in what the operator returns.
        mutated: operands whose own metadata changes, and into what.
    """

    returned: tuple[Any, ...]
    results: list[Told]
    paths: list[tuple[int, ...]]
    mutated: dict[int, Told]


def predict(
    operator: Any,
    args: Sequence[Template],
    kwargs: dict[str, Template],
    operands: Sequence[Metadata],
    scalars: Sequence[float],
) -> Prediction | None:
    """What a call gives; None: only the node can tell.

    Raises:
        Exception: what torch raises for such arguments.
    """
    if operator in _MISTAKEN:
        return None
    numbers = iter(scalars)
    with _MODE:
        anywhere = operator.overloadpacket in _ANYWHERE
        fakes = [_fake(each, anywhere) for each in operands]
        left = iter(fakes)

        def given(template: Template) -> Any:
            kind = template[0]
            if kind == "tensor":
                return next(left)
            if kind == "number":
                value = next(numbers)
                return int(value) if template[1] == "int" else value
            if kind == "list":
                return [given(each) for each in template[1]]
            return torch.device("cpu") if kind == "device" else template[1]

        try:
            with quiet():
                result = operator(
                    *[given(each) for each in args], **{name: given(each) for name, each in kwargs.items()}
                )
        except _ASK:
            return None
        results: list[Told] = []
        paths: list[tuple[int, ...]] = []

        def returned(value: Any, path: tuple[int, ...]) -> tuple[Any, ...]:
            if isinstance(value, torch.Tensor):
                for position, fake in enumerate(fakes):
                    if value is fake:
                        return "operand", position
                if value.layout != torch.strided:
                    raise UnsupportedOperation(
                        f"{operator} gives a tensor of layout {value.layout}: nodes hold dense tensors"
                    )
                results.append(told(value))
                paths.append(path)
                return "new", len(results) - 1
            if isinstance(value, (list, tuple)):
                kind = "list" if isinstance(value, list) else "tuple"
                return kind, [returned(each, (*path, i)) for i, each in enumerate(value)]
            return "constant", value

        shape = returned(result, ())
        mutated = {
            position: told(fake)
            for position, (fake, known) in enumerate(zip(fakes, operands, strict=True))
            if told(fake) != known.told
        }
        return Prediction(shape, results, paths, mutated)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let torch log nothing of shapes that do not fit in this thread."""
    _predicting.now = True
    try:
        yield
    finally:
        _predicting.now = False


class _Quiet(logging.Filter):
    """Drops what torch logs of shapes that do not fit: the error is the program's, and is raised to it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_predicting, "now", False)


_predicting = threading.local()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_Quiet())


#: it imports torch's compiler when it is made: with this module, while the nodes start
_MODE = FakeTensorMode()


def _fake(known: Metadata, anywhere: bool) -> torch.Tensor:
    """A tensor of this metadata; ``anywhere``: in a storage that no view leaves."""
    if 0 in known.shape:
        reach = 0
    else:
        reach = sum((n - 1) * s for n, s in zip(known.shape, known.stride, strict=True)) + 1
    if not anywhere and not known.offset and reach <= _numel(known.shape):
        made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="cpu")
    else:
        # A view's storage is larger than what the view shows; how large, only its node knows.
        size = _LARGEST // known.dtype.itemsize if anywhere else known.offset + reach
        base = torch.empty(size, dtype=known.dtype, device="cpu")
        made = base.as_strided(known.shape, known.stride, known.offset)
    if known.lazy:
        torch._C._set_conj(made, known.conj)
        torch._C._set_neg(made, known.neg)
    return made


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
