"""The control socket of a launcher, for ``shoal scale``, in a directory that only this user can enter.

The launcher's process id is in the name of the socket.  Each connection carries one request and one reply.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ...common.decoding import MalformedMessage, from_json
from ...errors import LaunchError, UsageError
from ...rendezvous import private_directory

_PREFIX = "launcher-"
_MAX_REQUEST_BYTES = 4096
#: timeout of a request in seconds; a launcher's loop never blocks for long
_REQUEST_TIMEOUT_S = 10.0


class Scale(msgspec.Struct, frozen=True):
    """A request to change the number of processes to ``wanted``."""

    wanted: int


class ControlReply(msgspec.Struct, frozen=True):
    """The reply of the launcher; ``done``: it accepted the request."""

    done: bool
    text: str


class ControlServer:
    """The launcher's side of the control socket.

    ``scale`` performs a request and returns a description of it, or raises UsageError.
    """

    def __init__(self, selector: selectors.BaseSelector, scale: Callable[[int], str]) -> None:
        self._selector = selector
        self._scale = scale
        self._directory = private_directory()
        self._name = f"{_PREFIX}{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (self._directory / self._name).unlink(missing_ok=True)  # of an earlier process with this id
        with _address(self._directory, self._name) as address:
            self._socket.bind(address)
        self._socket.listen()
        self._socket.setblocking(False)
        self._connections: set[socket.socket] = set()
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        (self._directory / self._name).unlink(missing_ok=True)
        for connection in list(self._connections):
            self._disconnect(connection)
        self._selector.unregister(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            self._connections.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._answer(connection))

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            try:
                answer = ControlReply(
                    True, self._scale(from_json(connection.recv(_MAX_REQUEST_BYTES), Scale).wanted)
                )
            except (UsageError, MalformedMessage) as error:
                answer = ControlReply(False, str(error))
            connection.send(msgspec.json.encode(answer))
        self._disconnect(connection)

    def _disconnect(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection)
        connection.close()


def launchers() -> list[int]:
    """The process ids of this user's launchers that accept requests."""
    directory = private_directory()
    found = []
    for path in directory.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdecimal():
            try:
                _connected(int(number)).close()
            except ConnectionRefusedError:  # it was killed
                path.unlink(missing_ok=True)
            except OSError:
                continue
            else:
                found.append(int(number))
    return sorted(found)


def ask(launcher: int, wanted: int) -> str:
    """Ask the launcher with process id ``launcher`` for ``wanted`` processes; return its description.

    Raises:
        UsageError: it refuses the request.
        LaunchError: there is no such launcher, or it does not answer.
    """
    try:
        with _connected(launcher) as connection:
            connection.send(msgspec.json.encode(Scale(wanted)))
            answer = from_json(connection.recv(_MAX_REQUEST_BYTES), ControlReply)
    except (OSError, MalformedMessage) as error:
        raise LaunchError(f"process {launcher} does not answer as a `shoal run --max`: {error}") from error
    if not answer.done:
        raise UsageError(answer.text)
    return answer.text


def _connected(launcher: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_REQUEST_TIMEOUT_S)
    try:
        with _address(private_directory(), f"{_PREFIX}{launcher}") as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _address(directory: Path, name: str) -> Iterator[str]:
    """The address of a socket in ``directory``; its path may be longer than a socket address allows."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
