"""What a broken or hostile program may write into a store in the place of a JSON value."""

from __future__ import annotations

import json
import random
from typing import Any

_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**80, 1.5, 1e308, "", "x", "0", "\0", "/", "//", "a/b/c", "x" * 2000,
    [], {}, "²",
    "pid:[1]/0/1", "pid:[1]/-1/1", "pid:[1]/9999999999999999/1", "pid:[1]/1/1\n", "pid:[1]/\u0663/1",
)  # fmt: skip
_RAW = (
    b"", b"\xff", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"-0", b"007", b"9" * 40, b" ",
    b"again", b"x" * 300_000, b'"' + b"\\u0000" * 50 + b'"', b"1e999", b"NaN",
)  # fmt: skip


def junk(choose: random.Random, value: dict[str, Any] | int) -> bytes:
    """``value`` in which something is wrong, or something else altogether."""
    raw = json.dumps(value).encode()
    match choose.randrange(5):
        case 0:
            return choose.choice(_RAW)
        case 1:
            return choose.randbytes(choose.randrange(1, 60))
        case 2:
            flipped = bytearray(raw)
            flipped[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
            return bytes(flipped)
        case 3:
            return raw[: choose.randrange(len(raw))] + choose.choice((b"", raw, b"}"))
        case _ if isinstance(value, int):
            return json.dumps(choose.choice(_ODD)).encode()
        case _:
            changed = dict(value)
            for name in choose.sample(list(value), choose.randint(1, len(value))):
                if choose.random() < 0.3:
                    del changed[name]
                else:
                    changed[name] = choose.choice(_ODD)
            return json.dumps(changed).encode()
