"""The first words on an authenticated connection: who is at each end, and the memory that each end shares.

The connecting side speaks first.  Each side says one record of a type of its own; over a unix socket both
then hand over the descriptor of their shared memory.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..common.decoding import MalformedMessage, from_msgpack
from ..errors import WireError
from .connection import Connection
from .unix import peer_pid, recv_fds, send_fds

H = TypeVar("H", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that a process on this host handed over, its descriptor here, and the process id."""

    fd: int
    pid: int

    def close(self) -> None:
        os.close(self.fd)


def introduce(connection: Connection, mine: H, timeout: float) -> H:
    """Say ``mine`` on a connection that this side made; what the other side says of itself.

    Raises:
        WireError, WireTimeout: as of ``Connection.recv``, and for what is no such record.
    """
    connection.send(msgspec.msgpack.encode(mine), timeout)
    return _heard(connection, type(mine), timeout)


def be_introduced(connection: Connection, kind: type[H], answer: Callable[[H], H], timeout: float) -> H:
    """Hear what the other side, which made the connection, says of itself; then say ``answer`` of that."""
    theirs = _heard(connection, kind, timeout)
    connection.send(msgspec.msgpack.encode(answer(theirs)), timeout)
    return theirs


def share_memory(connection: Connection, fd: int, timeout: float) -> SharedMemory | None:
    """Hand over the memory ``fd``, which stays open here, and take the other side's; None: over TCP."""
    if connection.socket.family != socket.AF_UNIX:
        return None
    pid = peer_pid(connection)
    send_fds(connection, [fd], timeout)
    (theirs,) = recv_fds(connection, 1, timeout)
    return SharedMemory(theirs, pid)


def _heard(connection: Connection, kind: type[H], timeout: float) -> H:
    try:
        return from_msgpack(connection.recv(timeout), kind)
    except MalformedMessage as error:
        raise WireError(f"{connection.peer} introduced itself in other words than ours: {error}") from error
