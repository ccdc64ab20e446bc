"""Decoding of types that several threads are the first to decode."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: with msgspec's own functions (0.22) it ends by SIGSEGV
PROGRAM = """
import sys, threading, types
import msgspec
from shoal.decoding import converted, from_json, from_msgpack

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
        ("msgspec.to_builtins", "converted"),
    ],
)
def test_threads_that_are_the_first_to_decode_a_type_see_it_whole(encode: str, decode: str) -> None:
    program = PROGRAM.replace("HOW_ENCODED", encode).replace("HOW_DECODED", decode)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "decoded\n"), ended.stderr
