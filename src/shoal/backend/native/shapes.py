"""The encoding of tensor shapes in the header of a message, which has eight 64-bit words for lengths.

A shape of more than eight dimensions is packed into these words: the number of dimensions, then each length
in base 128 (7 bits a byte, little-endian).  The highest bit of the last word marks a packed shape, since no
length is that large.  Received shapes were checked by ``cpp/net/check.cc``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError

_MAX_DIMS = 8


def packed(shape: Sequence[int]) -> list[int]:
    """Return the words of a message's header for ``shape``; raise UsageError if the shape does not fit."""
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
    """Return the shape that the words ``dims`` of a header encode."""
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
