"""The exchange of hello messages and shared memory on a new authenticated connection.

Each side sends one hello, the connecting side first.  Over a unix socket both can then exchange descriptors
of shared memory.
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
    """Shared memory of another process on this host: its descriptor here, and the id of the process."""

    fd: int
    pid: int

    def close(self) -> None:
        os.close(self.fd)


def introduce(connection: Connection, mine: H, timeout: float) -> H:
    """Send the hello ``mine`` on a connection that this side made; return that of the other side.

    Raises like ``Connection.recv``, and WireError for an invalid hello.
    """
    connection.send(msgspec.msgpack.encode(mine), timeout)
    return _heard(connection, type(mine), timeout)


def be_introduced(connection: Connection, kind: type[H], answer: Callable[[H], H], timeout: float) -> H:
    """Receive the hello of the connecting side, send the hello ``answer(it)``, and return the former."""
    theirs = _heard(connection, kind, timeout)
    connection.send(msgspec.msgpack.encode(answer(theirs)), timeout)
    return theirs


def share_memory(connection: Connection, fd: int, timeout: float) -> SharedMemory | None:
    """Send the descriptor ``fd``, which is not closed here; return the other side's memory; None over TCP."""
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
        raise WireError(f"received an invalid hello from {connection.peer}: {error}") from error
