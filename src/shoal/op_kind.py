"""The kinds of operations."""

from __future__ import annotations

import enum


class OpKind(enum.IntEnum):
    """The kind of an operation.  The value is its code in the protocol."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


#: names by code
KIND_NAMES = {kind.value: kind.name.lower() for kind in OpKind}
