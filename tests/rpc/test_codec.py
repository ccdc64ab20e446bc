"""What comes out of the codec is what went in, with its memory shared as it was."""

from __future__ import annotations

import ctypes
import dataclasses
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import UsageError
from shoal.rpc.codec import pickled as codec
from shoal.rpc.codec.pickled import EncodedValue, decode, encode
from shoal.spec import DTYPES_BY_CODE
from tests.support.programs import run_program


@dataclasses.dataclass
class End:
    """One end of a route."""

    shares_main: bool = True
    devices: None = None


def carried(message: EncodedValue) -> list[bytearray]:
    """The parts as they arrive: in memory of the receiver's own."""
    return [bytearray(ctypes.string_at(*part)) for part in message.parts]


def sent(value: Any, way: End | None = None) -> Any:
    message = encode(value, way, "a test")
    return decode(message.head, carried(message), way)


@dataclasses.dataclass
class Point:
    x: int
    y: torch.Tensor


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        2**70,
        "text",
        b"bytes",
        [1, (2, {"a": {3}})],
        Ellipsis,
        ValueError,
        torch.float32,
        len,
        torch.add,
    ],
)
def test_plain_values_arrive(value: Any) -> None:
    assert sent(value) == value


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*DTYPES_BY_CODE.values(), torch.complex64, torch.uint64, torch.bits8])
def test_tensors_of_every_dtype_arrive(dtype: torch.dtype) -> None:
    x = torch.arange(48, dtype=torch.uint8).view(dtype).clone()
    y = sent(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


def test_a_result_is_memory_of_the_receivers_own() -> None:
    x = torch.ones(3)
    y = sent(x)
    y += 1
    assert x.tolist() == [1, 1, 1]
    assert y.tolist() == [2, 2, 2]


def test_views_share_memory_there_as_they_do_here() -> None:
    base = torch.arange(12.0)
    message = encode([base, base.view(3, 4)[1], base[::2], base.view(torch.int32)], None, "a test")
    assert len(message.parts) == 1
    whole, row, even, bits = decode(message.head, carried(message), None)
    whole[4] = 99
    assert row.tolist() == [99, 5, 6, 7]
    assert even[2] == 99
    assert bits.view(torch.float32)[4] == 99


def test_of_a_large_storage_only_the_span_in_use_is_sent() -> None:
    base = torch.arange(100_000.0)
    message = encode([base[50_001:50_003], base[50_002:50_008]], None, "a test")
    (part,) = message.parts
    assert part[1] <= 64
    first, second = decode(message.head, carried(message), None)
    assert (first.tolist(), second.tolist()) == ([50_001, 50_002], list(range(50_002, 50_008)))


def test_strides_are_kept() -> None:
    x = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    expanded = torch.ones(1).expand(5)
    y, wide = sent([x, expanded])
    assert y.stride() == x.stride()
    assert torch.equal(y, x)
    assert wide.stride() == (0,)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors_arrive(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert torch.equal(sent(x), x)
    assert torch.equal(sent(torch.ones(9)[4:][:0]), torch.ones(0))


def test_requires_grad_is_kept_and_a_graph_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    assert sent(x).requires_grad
    assert sent(x).is_leaf
    with pytest.raises(
        UsageError, match=r"a test: a tensor of shape \(2,\) is the result of MulBackward0.*x\.detach\(\)"
    ):
        encode({"a": [x * 2]}, None, "a test")


def test_parameters_modules_and_attributes_arrive() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.name_of_mine = "w"
    copy = sent(model)
    assert type(copy.weight) is torch.nn.Parameter
    assert copy.weight.name_of_mine == "w"
    assert torch.equal(copy.weight, model.weight)
    frozen = sent(torch.nn.Parameter(torch.ones(1), requires_grad=False))
    assert not frozen.requires_grad


def test_the_same_tensor_is_the_same_there() -> None:
    x = torch.ones(2)
    a, b = sent([x, x])
    assert a is b


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_sparse_quantised_conjugate_and_meta_tensors_arrive() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sent(sparse).to_dense(), torch.eye(3))
    rows = torch.eye(3).to_sparse_csr()
    assert torch.equal(sent(rows).to_dense(), torch.eye(3))
    whole = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)
    assert torch.equal(sent(whole).dequantize(), torch.ones(3))
    z = torch.tensor([1 + 2j]).conj()
    assert torch.equal(sent(z), torch.tensor([1 - 2j]))
    assert sent(torch.ones(3, device="meta")).device.type == "meta"


def test_arrays_go_beside_the_pickle() -> None:
    x = np.arange(10_000.0)
    message = encode(x, None, "a test")
    assert len(message.head) < 500
    y = decode(message.head, carried(message), None)
    assert np.array_equal(x, y)
    y[0] = 7
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert not sent(fixed).flags.writeable
    both = sent(
        [torch.ones(2), np.ones(3), torch.ones(4), pickle.PickleBuffer(bytearray(b"abc")), np.ones(0)]
    )
    assert [len(each) for each in both] == [2, 3, 4, 3, 0]


def test_classes_of_modules_go_by_name() -> None:
    point = sent(Point(1, torch.ones(2)))
    assert type(point) is Point
    assert point.y.tolist() == [1, 1]


def test_what_has_no_name_goes_by_value() -> None:
    bias = torch.ones(2)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + bias

    class Local:
        def answer(self) -> int:
            return 42

    message = encode([shifted, lambda x: x + 1, Local()], None, "a test")
    assert len(message.parts) == 1, "the tensor of the closure goes beside the pickle too"
    moved, plus, local = decode(message.head, carried(message), None)
    assert moved(torch.ones(2)).tolist() == [2, 2]
    assert plus(1) == 2
    assert local.answer() == 42


def test_a_graph_in_a_closure_is_refused() -> None:
    bias = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(UsageError, match=r"x\.detach\(\)"):
        encode(lambda: bias, None, "a test")


def test_without_cloudpickle_the_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_value_pickler", None)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"a test: .*pip install cloudpickle"):
        encode(lambda: 1, None, "a test")
    assert sent(torch.ones(2)).tolist() == [1, 1]


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"a test cannot be sent: TypeError: cannot pickle '_thread.lock' object"
    ):
        encode([1, threading.Lock()], None, "a test")


MAIN = """
import sys
from shoal.rpc.codec.pickled import decode, encode
class Route:
    shares_main, devices = {shares}, None
class Mine:
    pass
def count():
    global counter
    counter += 1
    return counter
counter = 0
message = encode([count, Mine, lambda: 7], Route(), "a test")  # a lambda has no name to go by
there, mine, seven = decode(message.head, [], Route())
there()
print(counter, there is count, mine() is not None, seven())
"""


@pytest.mark.parametrize(("shares", "printed"), [(True, "1 True True 7"), (False, "0 False True 7")])
def test_a_programs_own_functions_go_by_name_to_those_that_run_it(
    tmp_path: Path, shares: bool, printed: str
) -> None:
    """By value they would count in a copy of the program's globals."""
    script = tmp_path / "program.py"
    script.write_text(MAIN.format(shares=shares))
    (output,) = run_program(script, 1, folder=tmp_path)
    assert output.split() == printed.split()


def test_rebuilding_finds_the_route() -> None:
    end = End()
    assert sent(Traveller(), end) is end
    assert codec.current_route() is None


class Traveller:
    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        assert codec.current_route() is not None
        return codec.current_route, ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_arrive(layout: torch.layout) -> None:
    parts = [torch.arange(2.0), torch.arange(3.0)]
    x = torch.nested.as_nested_tensor(parts, layout=layout)
    y = sent(x)
    assert (y.is_nested, y.layout) == (True, layout)
    assert all(torch.equal(a, b) for a, b in zip(y.unbind(), parts, strict=True))
    x.requires_grad_()
    with pytest.raises(UsageError, match=r"a tensor of nested tensors is the result of .*: send x\.detach"):
        sent(x * 2)
