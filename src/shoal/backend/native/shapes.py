"""How the header of a message, which has words for eight lengths, holds the shape of any tensor.

A shape of more dimensions is packed: their number, then its lengths in seven bits a byte.  The highest bit of
the last word tells such a shape from a plain one, since no length is that large.  What is received was
checked by ``cpp/transport/check.cc``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError

_MAX_DIMS = 8


def packed(shape: Sequence[int]) -> list[int]:
    """The words of a message's header that tell the shape.

    Raises:
        UsageError: they have no room for it.
    """
    if len(shape) <= _MAX_DIMS:
        return list(shape)
    encoded = bytearray([len(shape)])
    for length in shape:
        while length > 0x7F:
            encoded.append(length & 0x7F | 0x80)
            length >>= 7
        encoded.append(length)
    if len(encoded) >= 8 * _MAX_DIMS:
        raise UsageError(f"a message cannot carry the shape {tuple(shape)}; send a view of fewer dimensions")
    encoded = encoded.ljust(8 * _MAX_DIMS - 1, b"\0") + b"\x80"
    return [int.from_bytes(encoded[i : i + 8], "little") for i in range(0, len(encoded), 8)]


def unpacked(dims: list[int]) -> list[int]:
    """The shape that a header's words stand for."""
    if len(dims) < _MAX_DIMS or not dims[-1] >> 63:
        return dims
    encoded = b"".join(word.to_bytes(8, "little") for word in dims)
    shape = [0] * encoded[0]
    place = 1
    for i in range(len(shape)):
        shift = 0
        while encoded[place] & 0x80:
            shape[i] |= (encoded[place] & 0x7F) << shift
            shift += 7
            place += 1
        shape[i] |= encoded[place] << shift
        place += 1
    return shape
