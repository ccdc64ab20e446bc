"""Operators that the master composes of others: attention, LSTM, GRU, packed sequences, checks of ``linalg``.

The decomposition of attention and recurrent layers depends on the device. For a device that torch does not
know, it takes the decomposition for GPUs, or unfused operators. So these operators are recorded once for each
kind of arguments: torch runs them on fake tensors of the node's own device, and the recorded operators are
then called with the node's tensors, under autograd. The results are bitwise those of the node's device. For
tensors on a GPU of a node the recording has plain operators only, because this process may have neither a GPU
nor a torch build for GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...common.never_compile import never_compile
from ...errors import DeviceMismatch, UnsupportedOperation
from ..node.node_operators import CHECKS
from ..protocol.operators import special
from .dispatch import dispatch, mismatch
from .node_devices import node
from .prediction import quiet
from .tensor import RemoteTensor, new_tensor

#: the operators that this module handles
NAMES = (
    "scaled_dot_product_attention",
    *(f"{kind}.{given}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for given in ("input", "data")),
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
)
#: maximum number of recordings kept (LRU)
MAX_RECORDINGS = 1024


class _Value(NamedTuple):
    """Placeholder of a tensor: its index among the given and new tensors."""

    at: int


class _Device(NamedTuple):
    """Placeholder of the node's own device."""


class _Step(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    made: list[int]


class _Recording(NamedTuple):
    """The calls of a composite operator; `size` counts the given and the new tensors."""

    size: int
    steps: list[_Step]
    result: Any


@never_compile
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._kept = list(given)  # a reference to each tensor keeps the ids unique
        self._indices = {id(each): i for i, each in enumerate(given)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            given = self.noted(args), self.noted(kwargs or {})
            self.steps.append(_Step(func, *given, [self._index(each) for each in _tensors(result)]))
        return result

    def noted(self, value: Any) -> Any:
        """`value` with placeholders for tensors and devices."""

        def note(each: Any) -> Any:
            if isinstance(each, Tensor) and id(each) in self._indices:
                return _Value(self._indices[id(each)])
            return _Device() if isinstance(each, torch.device) else each

        return tree_map(note, value)

    def _index(self, tensor: Tensor) -> int:
        if id(tensor) not in self._indices:
            self._indices[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        return self._indices[id(tensor)]

    @property
    def count(self) -> int:
        return len(self._kept)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _cache_key(value: Any) -> Any:
    """Part of the key of a recording; includes the elements of the master's tensors (sequence lengths)."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value.dtype, str(value.tolist())
        return value.shape, value.stride(), value.dtype, value.requires_grad, value.get_device() >= 0
    if isinstance(value, (list, tuple)):
        return tuple(_cache_key(each) for each in value)
    return type(value), value


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def _isolated_modes(plain: bool) -> Iterator[None]:
    """Disable the program's modes except grad mode; `plain`: also the kernels that only CPUs have."""
    grad_enabled = torch.is_grad_enabled()
    with (
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad_enabled),
        torch.autocast("cpu", enabled=False),
        quiet(),
        sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext(),
        _without_onednn() if plain else contextlib.nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def _record(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Recording:
    """Run an operator on fake tensors; raises the errors that torch raises for these arguments."""

    def fake(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.device.type == "cpu":
            return each
        made = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cpu")
        return made.requires_grad_(each.requires_grad)

    plain = any(each.get_device() >= 0 for each in _tensors((tuple(args), kwargs)))
    with _isolated_modes(plain):
        args, kwargs = tree_map(fake, (tuple(args), kwargs))
        given = [each for each in _tensors((args, kwargs)) if isinstance(each, FakeTensor)]
        recorder = _Recorder(given)
        with recorder:
            result = func(*args, **kwargs)
        return _Recording(recorder.count, recorder.steps, recorder.noted(result))


_recordings: OrderedDict[Any, _Recording] = OrderedDict()
_recording = threading.Lock()


def _recorded(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Recording:
    settings = (
        torch.is_grad_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
        torch._C._get_mkldnn_enabled(),
    )
    key = func, _cache_key(args), _cache_key(list(kwargs.items())), settings
    with _recording:
        found = _recordings.get(key)
        if found is not None:
            _recordings.move_to_end(key)
            return found
    found = _record(func, args, kwargs)
    with _recording:
        _recordings[key] = found
        if len(_recordings) > MAX_RECORDINGS:
            _recordings.popitem(last=False)
    return found


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute a composite operator like the node's device.

    Raises:
        DeviceMismatch: a tensor is on the master and is neither a number nor the lengths of sequences.
        Exception: any error that torch raises for these arguments.
    """
    given = [each for each in _tensors((tuple(args), kwargs)) if each.device.type != "cpu"]
    device = given[0].device
    named = *zip([a.name for a in func._schema.arguments], args, strict=False), *kwargs.items()
    for name, value in named:
        for each in _tensors(value):
            if each.device.type != device.type and each.dim() and name != "batch_sizes":
                raise mismatch(func._schema.name, name, each, device)
    recording = _recorded(func, args, kwargs)
    values: list[Any] = given + [None] * (recording.size - len(given))

    def fill(each: Any) -> Any:
        if isinstance(each, _Value):
            return values[each.at]
        return device if isinstance(each, _Device) else each

    def substitute(value: Any) -> Any:
        return tree_map(fill, value, is_leaf=lambda each: isinstance(each, (_Value, _Device)))

    within = max(each.get_device() for each in given)
    with contextlib.nullcontext() if within < 0 else node(device.index, within):
        for step in recording.steps:
            made = step.func(*substitute(step.args), **substitute(step.kwargs))
            for index, tensor in zip(step.made, _tensors(made), strict=True):
                values[index] = tensor
    return substitute(recording.result)


special(*(f"aten::{name}" for name in NAMES))(run)


@special("aten::_nested_tensor_from_mask")
def _refuse_nested(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperation(
        "nn.TransformerEncoder with a padding mask uses nested tensors in eval mode, and nodes hold dense "
        "tensors only: create it with enable_nested_tensor=False"
    )


# -- packed sequences: the master has the lengths, and slices and concatenates on the node ---


def _stretches(batch_sizes: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, size) for runs of steps with equal batch size."""
    begin = 0
    for size, steps in groupby(batch_sizes.tolist()):
        end = begin + len(list(steps))
        yield begin, end, size
        begin = end


@special("aten::_pack_padded_sequence")
def _pack(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, lengths, batch_first = args
    if type(x) is not RemoteTensor or type(lengths) is RemoteTensor:
        raise DeviceMismatch(
            "the lengths of sequences must be on the master and the sequences on the node: pack with "
            "lengths.cpu()"
        )
    x = x.transpose(0, 1) if batch_first else x
    # torch validates the lengths.
    _, batch_sizes = func(torch.empty(*x.shape[:2], 1, device="cpu"), lengths, False)
    parts = [x[begin:end, :size].flatten(0, 1) for begin, end, size in _stretches(batch_sizes)]
    return torch.cat(parts), batch_sizes


@special("aten::_pack_padded_sequence_backward")
def _pack_backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient, shape, batch_sizes, batch_first = args
    shape = [shape[1], shape[0], *shape[2:]] if batch_first else list(shape)
    made = torch.zeros(shape, dtype=gradient.dtype, device=gradient.device)
    at = 0
    for begin, end, size in _stretches(batch_sizes):
        part = gradient[at : at + (end - begin) * size]
        made[begin:end, :size].copy_(part.unflatten(0, (end - begin, size)))
        at += len(part)
    return made.transpose(0, 1) if batch_first else made


# -- error checks of ``torch.linalg`` results ---

torch.library.register_fake(f"{CHECKS}::linalg", lambda info, name, is_matrix, made: None)


@special("aten::_linalg_check_errors")
def _check_linalg(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    info, name = args
    made = getattr(info.handle, "checked_results", None)
    if made is None:
        return NotImplemented
    given = info, name, kwargs["is_matrix"], [new_tensor(each) for each in made]
    return dispatch(torch.ops.shoal_check.linalg.default, given, {})
