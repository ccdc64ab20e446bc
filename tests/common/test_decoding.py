"""Decoding of types that several threads are the first to decode."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from shoal.common.decoding import MalformedMessage, convert, from_json, from_msgpack, msgpack_decoder

#: with msgspec's own functions (0.22) it ends by SIGSEGV
PROGRAM = """
import sys, threading, types
import msgspec
from shoal.common.decoding import convert, from_json, from_msgpack

DEFINITIONS = '''
from __future__ import annotations
import msgspec
from typing import Annotated
class Inner(msgspec.Struct):
    a: Annotated[int, msgspec.Meta(ge=0)] = 0
    b: list[str] = []
class Outer(msgspec.Struct):
    x: Inner
    y: Annotated[str, msgspec.Meta(min_length=1)]
    z: Inner | None = None
'''
kinds = []
for number in range(200):
    module = sys.modules[f"kinds{number}"] = types.ModuleType(f"kinds{number}")
    exec(DEFINITIONS, module.__dict__)
    kinds.append(module.Outer)

def decode():
    for kind in kinds:
        value = kind(sys.modules[kind.__module__].Inner(1, ["b"]), "y")
        raw = HOW_ENCODED(value)
        together.wait()
        assert HOW_DECODED(raw, kind) == value

sys.setswitchinterval(1e-6)
together = threading.Barrier(4)
threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("decoded")
"""


@pytest.mark.parametrize(
    ("encode", "decode"),
    [
        ("msgspec.msgpack.encode", "from_msgpack"),
        ("msgspec.json.encode", "from_json"),
        ("msgspec.to_builtins", "convert"),
    ],
)
def test_threads_that_are_the_first_to_decode_a_type_see_it_whole(encode: str, decode: str) -> None:
    program = PROGRAM.replace("HOW_ENCODED", encode).replace("HOW_DECODED", decode)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "decoded\n"), ended.stderr


class Pair(msgspec.Struct):
    one: int
    other: object = None


DEEP = 100_000


@pytest.mark.parametrize(
    ("decode", "raw"),
    [
        (from_msgpack, b""),
        (from_msgpack, b"\xa1\xff"),
        (from_msgpack, b"\x81\xa3one\xa1x"),
        (from_msgpack, b"\x82\xa3one\x01\xa5other" + b"\x91" * DEEP + b"\xc0"),
        (from_msgpack, b"\x82\xa3one\x01\xa7unknown" + b"\x91" * DEEP + b"\xc0"),
        (lambda raw, kind: msgpack_decoder(kind)(raw), b"\x81\xa5other" + b"\x91" * DEEP + b"\xc0"),
        (from_json, b"{"),
        (from_json, b'{"one": 1, "other": "\xff"}'),
        (from_json, b'{"one": 1, "other": ' + b"[" * DEEP),
        (from_json, b'{"one": 1, "unknown": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
        (convert, {"one": "x"}),
    ],
)
def test_a_malformed_message_raises_one_kind_of_error(decode: Any, raw: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(raw, Pair)
