"""Prediction of an operator's results from metadata alone, with torch's fake tensors.

Fake tensors accept some arguments that kernels refuse, such as the difference of two bools, or an ``out``
that cannot hold the result. So that the error does not come from the node, at a later line, torch's own
kernel is run with small tensors of the same dtypes (:func:`check_arguments`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ...common import torch_features
from ...errors import DeviceMismatch
from ..commands.interrupts import defer_interrupt
from ..protocol.commands import Template, fill_templates
from ..protocol.metadata import SPARSE, Metadata, WireMetadata, unsupported_layout, wire_metadata

#: torch errors that mean: only the node can determine the result
_NODE_DETERMINED_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
#: operators with wrong fake metadata in torch: the loss of one sample, and weights that are not needed
_WRONG_METADATA = frozenset(
    {
        torch.ops.aten.multilabel_margin_loss_forward.default,
        torch.ops.aten._native_multi_head_attention.default,
    }
)
#: operators with wrong fake metadata for dtypes of two bytes
_WRONG_METADATA_16BIT = frozenset(
    {torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default}
)
#: operators whose results may be anywhere in the storage; only the node can check the bounds
_UNBOUNDED_VIEWS = frozenset({torch.ops.aten.as_strided, torch.ops.aten.as_strided_})
#: upper bound of the size of a storage in bytes
MAX_STORAGE_BYTES = 2**60
#: pointwise operators that refuse some values
_VALUE_DEPENDENT = frozenset(["mvlgamma"])
#: other operators whose success does not depend on values
_OTHERS = frozenset([
    "mm", "mv", "bmm", "dot", "vdot", "addmm", "addmv", "addr", "baddbmm", "copy", "fill", "masked_fill",
    "_softmax", "_log_softmax",
])  # fmt: skip
#: such operators that take lengths
_SIZED = frozenset(["view"])
#: maximum number of elements of all operands' memory for a run with the original shapes and strides
MAX_EXACT_ELEMENTS = 4096


class Prediction(NamedTuple):
    """The metadata of a call's results.

    Attributes:
        returned: structure of the return value: ("new", slot), ("operand", position), ("constant", value), or
            ("list", [...]) and ("tuple", [...]) of these.
        results: metadata of the new tensors.
        paths: paths of the new tensors in the operator's return value.
        mutated: new metadata of operands whose metadata changes, by position.
        memory: for each result, then each mutated operand: the position of the operand whose memory it
            shares, or, from the number of operands on, the number of a new storage.
    """

    returned: tuple[Any, ...]
    results: list[WireMetadata]
    paths: list[tuple[int, ...]]
    mutated: dict[int, WireMetadata]
    memory: list[int]

    def on(self, gpu: int) -> Prediction:
        """This prediction with all new tensors on a GPU of the node."""
        results = [each._replace(within=gpu) for each in self.results]
        mutated = {at: each._replace(within=gpu) for at, each in self.mutated.items()}
        return self._replace(results=results, mutated=mutated)


class CallToPredict(NamedTuple):
    """An operator, the templates of its arguments, the metadata of its operands, and its scalars."""

    operator: Any
    args: Sequence[Template]
    kwargs: dict[str, Template]
    operands: Sequence[Metadata]
    scalars: Sequence[float]

    def run(self, tensors: Iterable[torch.Tensor], device: Callable[[Template], torch.device]) -> Any:
        """Run the operator on these tensors; `device` converts a device template."""
        args, kwargs = fill_templates(self.args, self.kwargs, tensors, self.scalars, device)
        return self.operator(*args, **kwargs)


@contextlib.contextmanager
def _without_tangents() -> Iterator[None]:
    """Disable forward AD: otherwise torch looks for tangents of fake tensors to print them in errors."""
    level = forward_ad._current_level
    forward_ad._current_level = -1
    try:
        yield
    finally:
        forward_ad._current_level = level


@defer_interrupt  # an exception at certain points leaves torch's fake tensors unusable
def predict(call: CallToPredict) -> Prediction | None:
    """Predict the results of a call; None if only the node can determine them.

    Raises:
        DeviceMismatch: the tensors are on different devices within the node.
        Exception: any error that torch raises for these arguments.
    """
    operator, operands = call.operator, call.operands
    # The program's modes, such as tracers, must not see the operators called here.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), _without_tangents():
        in_halves = operator in _WRONG_METADATA_16BIT and any(each.dtype.itemsize == 2 for each in operands)
        if operator in _WRONG_METADATA or in_halves or _is_of_node_only(operator):
            return None
        gpus = [each.within for each in operands if each.within >= 0] + _gpus((call.args, call.kwargs))
        if not gpus:
            try:
                found = _predict(call, True)
            except Exception:
                check_arguments(call, exactly=True)  # raises the kernel's error
                raise
            check_arguments(call)
            return found
        try:
            return _predict(call, False)
        except RuntimeError as error:
            if torch_features.is_device_mismatch(error):
                raise DeviceMismatch(
                    f"{operator}: {error} These are devices within a node: move the tensors to one of them, "
                    "with .cuda(k), or .within(-1) for the CPU"
                ) from None
            # The error is from the arguments, or from a GPU kernel that a CPU build of torch lacks.
            found = _predict(call, True)
            return None if found is None else found.on(gpus[-1])


def _is_of_node_only(operator: Any) -> bool:
    """Whether it is a custom operator without a fake kernel."""
    definition, schema = OPDEFS.get(operator._schema.name), operator._schema
    if definition is None or definition._abstract_fn is not None:
        return False
    return bool(schema.returns) or not schema.is_mutable  # torch creates one if it returns nothing


def _gpus(template: Any) -> list[int]:
    if isinstance(template, dict):
        return _gpus(list(template.values()))
    if isinstance(template, tuple) and template[:1] == ("device",):
        return [each for each in template[1:] if each >= 0]
    if isinstance(template, (list, tuple)):
        return [gpu for each in template for gpu in _gpus(each)]
    return []


def _predict(call: CallToPredict, on_processor: bool) -> Prediction | None:
    """Implement :func:`predict`; with `on_processor`, as if all tensors were on the node's CPU."""
    operator, operands = call.operator, call.operands

    def device(within: int) -> torch.device:
        return torch.device("cpu") if on_processor or within < 0 else torch.device("cuda", within)

    with _MODE:
        anywhere = operator.overloadpacket in _UNBOUNDED_VIEWS
        fakes = [_fake(each, anywhere, device(each.within)) for each in operands]
        storages = [_storage(fake) for fake in fakes]
        memory: list[int] = []

        def place(template: Template) -> torch.device:
            return device(template[1]) if len(template) > 1 else fakes[0].device if fakes else device(-1)

        try:
            with quiet():
                result = torch_features.corrected_metadata(operator, call.run(fakes, place))
        except _NODE_DETERMINED_ERRORS:
            return None
        results: list[WireMetadata] = []
        paths: list[tuple[int, ...]] = []
        given_back: list[torch.Tensor] = []

        def returned(value: Any, path: tuple[int, ...]) -> tuple[Any, ...]:
            if isinstance(value, torch.Tensor):
                for position, fake in enumerate(fakes):
                    if value is fake:
                        given_back.append(value)
                        return "operand", position
                if value.layout != torch.strided:
                    raise unsupported_layout(f"the result of {operator}", SPARSE)
                results.append(wire_metadata(value))
                memory.append(_index(storages, value))
                paths.append(path)
                return "new", len(results) - 1
            if isinstance(value, (list, tuple)):
                kind = "list" if isinstance(value, list) else "tuple"
                return kind, [returned(each, (*path, i)) for i, each in enumerate(value)]
            return "constant", value

        shape = returned(result, ())
        mutated = {
            position: wire_metadata(fake)
            for position, (fake, known) in enumerate(zip(fakes, operands, strict=True))
            if wire_metadata(fake)._replace(within=known.within) != known.wire
        }
        enlarged = mutated or any(not each.numel() for each in given_back)
        if enlarged and torch_features.writes_to_out(operator):
            # Only the kernel knows how it lays out a tensor that it enlarges, and torch does not mark all
            # operators that do this.
            return None
        memory += [_index(storages, fakes[position]) for position in mutated]
        return Prediction(shape, results, paths, mutated, memory)


def _storage(fake: torch.Tensor) -> int:
    return fake.untyped_storage()._cdata  # type: ignore[no-any-return]


def _index(storages: list[int], fake: torch.Tensor) -> int:
    storage = _storage(fake)
    if storage not in storages:
        storages.append(storage)
    return storages.index(storage)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's log records about shape mismatches in this thread."""
    _predicting.now = True
    try:
        yield
    finally:
        _predicting.now = False


class _Quiet(logging.Filter):
    """Drops torch's log records about shape mismatches: the error is raised to the program."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_predicting, "now", False)


_predicting = threading.local()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_Quiet())


#: created at import, while the nodes start, because this imports torch's compiler
_MODE = FakeTensorMode()


def _fake(known: Metadata, anywhere: bool, device: torch.device) -> torch.Tensor:
    """A fake tensor with this metadata; `anywhere`: its storage has the maximum size."""
    reach = 0 if 0 in known.shape else _reach(known)
    if not anywhere and not known.offset and reach <= math.prod(known.shape):
        made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=device)
    else:
        # The storage of a view is larger than the view; its size is known to the node only.
        size = MAX_STORAGE_BYTES // known.dtype.itemsize if anywhere else known.offset + reach
        base = torch.empty(size, dtype=known.dtype, device=device)
        made = base.as_strided(known.shape, known.stride, known.offset)
    known.set_lazy_bits(made)
    return made


# -- checks of arguments -----------------------------------------------------------------------------


def check_arguments(call: CallToPredict, exactly: bool = False) -> None:
    """Run a call on the master, if its success depends neither on values nor on random numbers.

    Large shapes are reduced so that equal lengths stay equal.

    Args:
        exactly: do not run if shapes had to be reduced, which would show in the error text.

    Raises:
        Exception: any error that torch raises for these arguments.
    """
    operator, operands = call.operator, call.operands
    tags, name = operator.tags, operator.overloadpacket.__name__.rstrip("_")
    if operator.namespace != "aten":
        return  # custom operators run on the node only
    if torch.Tag.pointwise not in tags and name not in _OTHERS | _SIZED:
        return
    if torch.Tag.nondeterministic_seeded in tags or name in _VALUE_DEPENDENT:
        return
    shapes = [each.shape for each in operands]
    strides: list[Sequence[int] | None] = [each.stride for each in operands]
    if sum(_reach(each) for each in operands) > MAX_EXACT_ELEMENTS:
        if exactly or name in _SIZED:
            return
        strides = [None] * len(operands)
        lengths = {length for shape in shapes for length in shape if length > 1}
        short = {length: i for i, length in enumerate(sorted(lengths), 2)} | {0: 0, 1: 1}
        shapes = [tuple(short[length] for length in shape) for shape in shapes]
    call.run(map(_sample_tensor, operands, shapes, strides), lambda template: torch.device("cpu"))


def _reach(known: Metadata) -> int:
    """Number of elements that the memory of this tensor spans."""
    return 1 + sum((n - 1) * stride for n, stride in zip(known.shape, known.stride, strict=True) if n)


def _sample_tensor(known: Metadata, shape: Sequence[int], stride: Sequence[int] | None) -> torch.Tensor:
    if stride is None:
        made = torch.ones(shape, dtype=known.dtype, device="cpu")
    else:
        made = torch.ones(_reach(known), dtype=known.dtype, device="cpu").as_strided(shape, stride)
    known.set_lazy_bits(made)
    return made
