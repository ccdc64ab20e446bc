"""The codec of restricted workers: what goes through it, and that nothing else comes out of it."""

from __future__ import annotations

import datetime
import random
from typing import Any

import msgspec
import pytest
import torch

from shoal.errors import RpcError, UsageError
from shoal.rpc.codec import plain

pack = msgspec.msgpack.encode


def memory(message: Any) -> list[bytearray]:
    """The parts of a message as they arrive."""
    return [
        bytearray(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), 0, (size,)).numpy().tobytes())
        if x.storage_offset() == 0
        else bytearray(x.contiguous().view(torch.uint8).numpy().tobytes())
        for x, (_, size) in zip(message.keep, message.parts, strict=True)
    ]


def there(value: Any) -> Any:
    message = plain.encode(value, "a test")
    return plain.decode(message.head, memory(message))


@pytest.mark.parametrize(
    "value",
    [None, True, -(2**63), 2**64 - 1, 1.5, "käse", b"\0\xff", [], {}, [1, [2, {"a": [None, b"x"]}]]],
)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    assert there(value) == value
    assert type(there(value)) is type(value)


@pytest.mark.parametrize("dtype", plain._DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_arrive(dtype: torch.dtype) -> None:
    x = torch.arange(24).to(torch.uint8).remainder(2).to(dtype).reshape(2, 3, 4)
    for each in (x, x.permute(2, 0, 1), x[:, :2], x[0, 0, 0], x[:0], x[:, :1, :1], x.expand(2, 2, 3, 4)):
        y = there({"x": [each]})["x"][0]
        assert (y.dtype, y.shape) == (dtype, each.shape)
        assert torch.equal(y.to(torch.complex128), each.to(torch.complex128))
    assert there(x.permute(2, 0, 1)).stride() == x.permute(2, 0, 1).stride()


def test_a_tuple_arrives_as_a_list_and_a_parameter_as_its_data() -> None:
    assert there((1, (2,))) == [1, [2]]
    assert there(torch.nn.Parameter(torch.ones(2))).requires_grad is False


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "a object cannot be sent to or from a restricted worker"),
        ({1}, "a set cannot"),
        ({1: 2}, "a dict with keys other than str"),
        (datetime.datetime(2000, 1, 1), "a datetime cannot"),
        (2**64, "cannot be sent"),
        (deep(plain.MAX_DEPTH + 1), "more than 64 nested lists"),
        (torch.ones(2, requires_grad=True) * 2, r"send x\.detach"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.empty(2**48, 0), "a tensor of shape"),
    ],
)
def test_what_is_no_plain_value_is_not_sent(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=rf"a test.*{words}"):
        plain.encode([value] if "more than" not in words else value, "a test")
    assert there(deep(plain.MAX_DEPTH)) == deep(plain.MAX_DEPTH)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_not_sent(layout: torch.layout) -> None:
    x = torch.nested.as_nested_tensor([torch.ones(2)], layout=layout)
    with pytest.raises(UsageError, match=r"a test: a nested tensor .* list\(x\.unbind\(\)\)"):
        plain.encode([x], "a test")


def tensor(part: Any = 0, dtype: Any = "float32", shape: Any = (2,), strides: Any = (1,)) -> bytes:
    return pack(msgspec.msgpack.Ext(1, pack([part, dtype, shape, strides])))


def test_more_tensors_than_one_letter_takes_are_not_sent() -> None:
    with pytest.raises(
        UsageError, match="a test: 70000 tensors and buffers; one value may have at most 65535"
    ):
        plain.encode([torch.ones(1)] * 70_000, "a test")


def test_more_values_than_one_letter_takes_are_not_sent() -> None:
    shared: Any = []
    for _ in range(22):
        shared = [shared, shared]
    for value in (shared, [0] * plain.MAX_VALUES, [{str(i): 0 for i in range(plain.MAX_VALUES // 2)}]):
        with pytest.raises(UsageError, match="a test: more than 262144 values in one message"):
            plain.encode(value, "a test")
    assert len(there([0] * (plain.MAX_VALUES - 1))) == plain.MAX_VALUES - 1


#: a value of each form that msgpack has
FORMS: list[Any] = [
    None, True, 1, -1, 200, 40_000, 2**31, 2**40, -100, -20_000, -(2**30), -(2**40), 1.5, "", "text",
    "t" * 100, "t" * 300, "t" * 70_000, b"", b"b" * 300, b"b" * 300_000,
    [], [0] * 20, [0] * 70_000, {}, {"a": 1},
    {f"key {i}": i for i in range(20)}, {f"key {i}": i for i in range(66_000)},
    *(msgspec.msgpack.Ext(1, b"e" * size) for size in (1, 2, 4, 8, 16, 17, 300, 70_000)),
]  # fmt: skip


def values_in(value: Any) -> int:
    items: Any = value if type(value) is list else [*value, *value.values()] if type(value) is dict else ()
    return 1 + sum(map(values_in, items))


def test_values_are_counted_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, count = pack(FORMS), values_in(FORMS)
    monkeypatch.setattr(plain, "MAX_VALUES", count)
    plain._check_values(raw)
    monkeypatch.setattr(plain, "MAX_VALUES", count - 1)
    with pytest.raises(plain._InvalidBytes, match="more than"):
        plain._check_values(raw)


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xa0", b"\xc4\0", tensor(shape=[0], strides=[0])])
def test_many_small_values_are_refused_before_they_take_memory(item: bytes) -> None:
    count = plain.MAX_VALUES
    with pytest.raises(RpcError, match=r"more than 262144 values|more than 65535 tensors"):
        plain.decode(b"\xdd" + count.to_bytes(4, "big") + item * count, [])


@pytest.mark.parametrize(
    "head",
    [
        b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1k" * 100_000, pack(deep(plain.MAX_DEPTH + 1)), pack({1: 2}),
        b"\x81\xc0\xc0", b"\x81\x90\xc0",
        pack(datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)),
        pack(msgspec.msgpack.Ext(2, b"")), pack(msgspec.msgpack.Ext(1, b"")),
        pack(msgspec.msgpack.Ext(1, pack([1]))),
        pack([1, 2]) + b"\0", pack([msgspec.msgpack.Ext(1, pack([0, "float32", [2], [1], 7]))]),
        tensor(dtype="object"), tensor(dtype="qint8"), tensor(dtype="__class__"), tensor(dtype=3),
        tensor(part=1), tensor(part=-1), tensor(part=2**63), tensor(part="0"), tensor(part=1.0),
        tensor(shape=[3]), tensor(shape=[1]), tensor(shape=[-2]), tensor(shape=[]),
        tensor(shape=[2**62, 2**62]),
        tensor(shape=[2, 1]), tensor(shape=[2] + [1] * 64, strides=[1] * 65), tensor(shape=[0, 2**47, 2**47]),
        tensor(shape=[0, 2**47, 2**47], strides=[1, 1, 1]), tensor(strides=[0]), tensor(strides=[2]),
        tensor(strides=[-1]), tensor(strides=[2**62]), tensor(shape=[2, 2], strides=[1, 1], dtype="int16"),
        tensor(shape=[8], strides=[1], dtype="bool"), pack([1, msgspec.Raw(tensor()), msgspec.Raw(tensor())]),
    ],
)  # fmt: skip
def test_what_nobody_packed_is_refused(head: bytes) -> None:
    with pytest.raises(RpcError, match="received an invalid message"):
        plain.decode(head, [bytearray(b"\2" * 8)])


@pytest.mark.parametrize(
    "call", [None, [], ["f", []], [1, [], {}], ["f", {}, {}], ["f", [], []], ["f", [], {}, 1]]
)
def test_what_is_no_call_is_refused(call: Any) -> None:
    with pytest.raises(RpcError, match="received an invalid call"):
        plain.decode_call(pack(call), [])
    assert plain.decode_call(pack(["f", [1], {"k": 2}]), []) == ("f", [1], {"k": 2})


def mutated(seed: int) -> tuple[bytes, list[bytearray]]:
    """A call with tensors of which bits, bytes and lengths are wrong."""
    chance = random.Random(seed)
    x = torch.arange(12.0).reshape(3, 4)
    message = plain.encode_call(
        "score", [x, {"y": [x.T, x > 3, None]}, "text", -5], {"k": b"bytes"}, "a test"
    )
    head, parts = bytearray(message.head), memory(message)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(head)) if head else 0
        match chance.randrange(6):
            case 0:
                head[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                head[at : at + 1] = bytes([head[at] ^ (1 << chance.randrange(8))]) if head else b""
            case 2:
                del head[at : at + chance.randint(1, 9)]
            case 3:
                head[at:at] = chance.randbytes(chance.randint(1, 9))
            case 4:
                head[at : at + 9] = bytes([chance.choice(b"\xcf\xd3\xdd\xdf\xc6\xc9")]) + chance.randbytes(8)
            case 5 if parts:
                part = chance.randrange(len(parts))
                parts[part] = bytearray(chance.randbytes(chance.choice((0, 1, 12, 48, 49))))
                if chance.random() < 0.2:
                    del parts[part]
    return bytes(head), [part for part in parts if part]


def test_ten_thousand_mutated_letters_give_plain_values_or_are_refused() -> None:
    refused = 0
    for seed in range(10_000):
        head, parts = mutated(seed)
        try:
            name, args, kwargs = plain.decode_call(head, parts)
        except RpcError:
            refused += 1
            continue
        plain.encode([name, args, kwargs], f"seed {seed}")  # it is of plain values
        for x in tensors_in([args, kwargs]):
            x.sum()  # its memory is there
    assert 5_000 < refused < 10_000


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for each in value for x in tensors_in(each)] if isinstance(value, list) else []
