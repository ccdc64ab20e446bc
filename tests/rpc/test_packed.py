"""Small plain values go without a pickle; what comes from a peer is checked to the last byte."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from shoal.rpc.codec.pickled import decode, encode
from shoal.rpc.connection.endpoint import pack, unpack


def packed(value: Any) -> bytes:
    out = pack(value, b"")
    assert out is not None, "it takes a pickle"
    return out


def again(value: Any) -> Any:
    return unpack(packed(value), 0)


VALUES = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**63 - 1,
    1.5,
    -math.inf,
    "",
    "text, täxt, 文",
    b"",
    b"\0\xff",
    (),
    (1, ("a", (None, 2.0))),
    [],
    [1, [2, []]],
    {},
    {"a": 1, "b": {"c": [True]}},
    ((1, "x"), {"key": b"value"}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_are_packed_and_come_back(value: Any) -> None:
    back = again(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 1, 2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_small_tensors_are_packed_and_come_back_in_memory_of_their_own(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (torch.rand(shape) * 9).to(dtype)
    y = again((x,))[0]
    assert (type(y), y.dtype, y.shape, y.stride()) == (torch.Tensor, dtype, x.shape, x.stride())
    assert torch.equal(x, y)
    y.zero_()
    y.requires_grad_(dtype.is_floating_point)
    assert not dtype.is_floating_point or y.sum().backward() is None
    assert x.data_ptr() != y.data_ptr()


def shared_list() -> Any:
    x: list[int] = []
    return (x, x)


def circle() -> Any:
    x: list[Any] = []
    x.append(x)
    return x


def with_an_attribute() -> torch.Tensor:
    x = torch.ones(2)
    x.mine = 1  # type: ignore[attr-defined]
    return x


def overlapping() -> Any:
    x = torch.arange(6.0)
    return [x[:4], x[3:]]


def twice() -> Any:
    x = torch.ones(2)
    return (x, x)


class Text(str):
    """A class of the user's."""


LEFT_TO_PICKLE = {
    "a large int": lambda: 2**63,
    "half a surrogate": lambda: "\ud800",
    "a complex number": lambda: 1j,
    "a set": lambda: {1},
    "a subclass": lambda: Text("a"),
    "an int as a key": lambda: {1: 2},
    "a list twice": shared_list,
    "a circle": circle,
    "a tensor twice": twice,
    "tensors of the same memory": overlapping,
    "a gradient": lambda: torch.ones(2, requires_grad=True),
    "an attribute": with_an_attribute,
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "strides": lambda: torch.ones(2, 3).t(),
    "no elements": lambda: torch.ones(0),
    "a complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "an array": lambda: np.ones(2),
    "many lists": lambda: [[] for _ in range(100)],
    "a large string": lambda: "x" * 100_000,
    "a large tensor": lambda: torch.ones(100_000),
    "a deep tuple": lambda: ((((((((((1,),),),),),),),),),),
    "a function": lambda: len,
}


@pytest.mark.parametrize("what", LEFT_TO_PICKLE)
def test_whatever_a_pickle_would_keep_is_left_to_it(what: str) -> None:
    value = LEFT_TO_PICKLE[what]()
    assert pack(value, b"") is None
    assert pack((1, value), b"") is None


def test_two_parts_of_a_tensor_that_share_no_element_are_packed() -> None:
    x = torch.arange(6.0)
    first, second = again([x[:3], x[3:]])
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4, 5])


def tries(data: bytes) -> None:
    """A peer's bytes give a value or a ValueError."""
    with contextlib.suppress(ValueError):
        unpack(data, 0)


SAMPLE = (VALUES, torch.arange(6, dtype=torch.int16).view(2, 3), {"x": torch.ones(()), "y": "ä"})


def test_every_beginning_of_a_packed_value_is_refused() -> None:
    data = packed(SAMPLE)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"packed value|utf-8"):
            unpack(data[:length], 0)
    with pytest.raises(ValueError, match="goes on behind its end"):
        unpack(data + b"\0", 0)
    with pytest.raises(ValueError, match="is cut off"):
        unpack(data, len(data) + 5)


@pytest.mark.parametrize(
    ("data", "flaw"),
    [
        (b"\x0b", "unknown tag"),
        (b"\x07\xff\xff\xff\xff", "cut off"),
        (b"\x09\x01\0\0\0\x03" + bytes(8) + b"\0", "a key that is no string"),
        (b"\x07\x01\0\0\0" * 100 + b"\0", "too deep"),
        (b"\x0a\x01\xff" + bytes(2000), "tensor that cannot be"),
        (b"\x0a\xff\x00" + bytes(8), "tensor that cannot be"),
        (b"\x0a\x01\x01" + bytes(8), "tensor that cannot be"),
        (b"\x0a\x01\x01" + (2**62).to_bytes(8, "little") + bytes(8), "tensor that cannot be"),
        (b"\x0a\x01\x02" + (2**32).to_bytes(8, "little") * 2 + bytes(64), "tensor that cannot be"),
        (b"\x0a\x01\x01" + (2**64 - 1).to_bytes(8, "little") + bytes(8), "tensor that cannot be"),
        (b"\x0a\x11\x00" + bytes(8), "no such tensor"),
    ],
)
def test_what_no_packer_makes_is_refused(data: bytes, flaw: str) -> None:
    with pytest.raises(ValueError, match=flaw):
        unpack(data, 0)


def test_damaged_values_never_do_more_than_raise() -> None:
    data, chance = packed(SAMPLE), random.Random(7)
    for _ in range(20_000):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice(
                (0, 1, 10, 127, 255, chance.randrange(256))
            )
        tries(bytes(damaged[: chance.randrange(1, len(damaged) + 1)]))
        tries(chance.randbytes(chance.randrange(40)))


def test_the_codec_takes_whichever_form_there_is() -> None:
    small, large = encode((1, "a"), None, "a test"), encode((1, {2}), None, "a test")
    assert decode(small.head, (), None) == (1, "a")
    assert decode(large.head, (), None) == (1, {2})
    assert len(small.head) < 40
