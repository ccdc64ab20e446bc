"""How values stand in etcd: as they are, but for counters, at which many can count at once.

etcd counts how often a key was put since it was made: its *version*.  A key to which the same amount is added
again and again holds that amount and a base, and its value is the base plus the amount times the version.  So
each who adds puts once more what the key holds already, which others may do at the same moment.
"""

from __future__ import annotations

import re

from .job import KeyValue

#: before a value that begins like one of these, and before the amount and the base of a counter
_AS_IT_IS, _COUNTER = b"\0=", b"\0+"
_COUNTS = re.compile(rb"\0\+(-?\d{1,20}) (-?\d{1,40})")

#: amounts and sums up to these can be counted, and never get out of 64 bits by what others add meanwhile
_LARGEST_AMOUNT, _LARGEST_SUM = 2**31, 2**62


def stored(value: bytes) -> bytes:
    """What a key is to hold whose value is to be ``value``."""
    return _AS_IT_IS + value if value.startswith(b"\0") else value


def value_of(found: KeyValue) -> bytes | None:
    """The value of a key; None if it does not exist, and has no version."""
    if not found.version:
        return None
    if not found.value.startswith(b"\0"):
        return found.value
    if counter := _COUNTS.fullmatch(found.value):
        return b"%d" % (int(counter[2]) + int(counter[1]) * found.version)
    return found.value.removeprefix(_AS_IT_IS)


def stored_counter(found: KeyValue, total: bytes, amount: int) -> bytes | None:
    """What a key is to hold that was ``found``, and whose value gets ``total`` when ``amount`` is added.

    It is what the key holds already, if the same amount was added before.  None: it is not to be counted.
    """
    if abs(amount) > _LARGEST_AMOUNT or abs(int(total)) > _LARGEST_SUM:
        return None
    return _COUNTER + b"%d %d" % (amount, int(total) - amount * (found.version + 1))
