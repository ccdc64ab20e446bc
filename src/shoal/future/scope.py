"""Keys that identify operations issued in callbacks.

Callbacks run in different orders on different ranks, so their operations cannot be numbered with the other
operations of a group.  They are matched by a key, which every rank derives from the key of the future, the
index of the callback on it, and the index of the operation in the callback.
"""

from __future__ import annotations

import hashlib
import struct
from contextvars import ContextVar


def derive_key(purpose: bytes, *parts: int) -> int:
    """Return a key of 63 bits, never 0, that is equal on all ranks for equal arguments.

    Args:
        purpose: at most 16 bytes; keys of different purposes differ.
        parts: unsigned 64-bit numbers.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}Q", *parts), digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") & (2**63 - 1)) or 1


class CallbackScope:
    """The identity of one running callback, from which the keys of its operations are derived.

    Args:
        key: the key of the callback's future.
        index: the index of the callback among those of that future.
    """

    __slots__ = ("_index", "_issued", "_key")

    def __init__(self, key: int, index: int) -> None:
        self._key = key
        self._index = index
        self._issued = 0

    def next_key(self) -> int:
        """Return the key of the next operation issued in this callback, equal on all ranks."""
        key = derive_key(b"operation", self._key, self._index, self._issued)
        self._issued += 1
        return key


#: The scope of the callback that the current thread (or asyncio task) runs in; None outside callbacks, and in
#: callbacks of futures without a key.
callback_scope: ContextVar[CallbackScope | None] = ContextVar("shoal_callback_scope", default=None)
