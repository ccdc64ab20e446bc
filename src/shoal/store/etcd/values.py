"""The encoding of values in etcd: unchanged, except for counters, which many clients can increment at once.

etcd counts how often a key was put since its creation: its *version*. A key to which the same amount is added
repeatedly holds that amount and a base; its value is the base plus the amount times the version. So each
client adds by putting the present content again, which several clients can do at the same moment.
"""

from __future__ import annotations

import re

from .job import KeyValue

#: prefix of a value that begins with a zero byte, and prefix of the amount and base of a counter
_AS_IT_IS, _COUNTER = b"\0=", b"\0+"
_COUNTS = re.compile(rb"\0\+(-?\d{1,20}) (-?\d{1,40})")

#: the largest amounts and sums encoded as counters, so that concurrent additions stay within 64 bits
_LARGEST_AMOUNT, _LARGEST_SUM = 2**31, 2**62


def stored(value: bytes) -> bytes:
    """Return the encoding of ``value``."""
    return _AS_IT_IS + value if value.startswith(b"\0") else value


def value_of(found: KeyValue) -> bytes | None:
    """Return the value of a key; None if it does not exist (it has no version then)."""
    if not found.version:
        return None
    if not found.value.startswith(b"\0"):
        return found.value
    if counter := _COUNTS.fullmatch(found.value):
        return b"%d" % (int(counter[2]) + int(counter[1]) * found.version)
    return found.value.removeprefix(_AS_IT_IS)


def stored_counter(found: KeyValue, total: bytes, amount: int) -> bytes | None:
    """Return the encoding of ``total``, the sum of ``found`` and ``amount``, as a counter.

    It equals the present content if the same amount was added before. None: too large for a counter.
    """
    if abs(amount) > _LARGEST_AMOUNT or abs(int(total)) > _LARGEST_SUM:
        return None
    return _COUNTER + b"%d %d" % (amount, int(total) - amount * (found.version + 1))
