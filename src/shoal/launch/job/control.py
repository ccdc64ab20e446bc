"""How ``shoal scale`` reaches the launcher of a job: a socket in a directory that only this user can enter.

The socket has the launcher's process id for a name.  Each connection carries one request and one answer.
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
_LONGEST = 4096
#: seconds in which a launcher answers, whose loop waits for nothing
_PATIENCE = 10.0


class Scale(msgspec.Struct, frozen=True):
    """Asks for so many processes."""

    wanted: int


class ControlReply(msgspec.Struct, frozen=True):
    """What the launcher says; ``done``: it does what it was asked to do."""

    done: bool
    text: str


class Control:
    """The launcher's side.

    Args:
        selector: of the loop; the data of its keys are functions to call.
        scale: does what is asked, and tells in words what that is; raises UsageError.
    """

    def __init__(self, selector: selectors.BaseSelector, scale: Callable[[int], str]) -> None:
        self._selector = selector
        self._scale = scale
        self._directory = private_directory()
        self._name = f"{_PREFIX}{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (self._directory / self._name).unlink(missing_ok=True)  # of a launcher that had this number
        with _address(self._directory, self._name) as address:
            self._socket.bind(address)
        self._socket.listen()
        self._socket.setblocking(False)
        self._guests: set[socket.socket] = set()
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Take no more requests."""
        (self._directory / self._name).unlink(missing_ok=True)
        for guest in list(self._guests):
            self._dismiss(guest)
        self._selector.unregister(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            guest, _ = self._socket.accept()
            guest.setblocking(False)
            self._guests.add(guest)
            self._selector.register(guest, selectors.EVENT_READ, lambda: self._answer(guest))

    def _answer(self, guest: socket.socket) -> None:
        with suppress(OSError):
            try:
                answer = ControlReply(True, self._scale(from_json(guest.recv(_LONGEST), Scale).wanted))
            except (UsageError, MalformedMessage) as error:
                answer = ControlReply(False, str(error))
            guest.send(msgspec.json.encode(answer))
        self._dismiss(guest)

    def _dismiss(self, guest: socket.socket) -> None:
        self._guests.discard(guest)
        self._selector.unregister(guest)
        guest.close()


def launchers() -> list[int]:
    """The process ids of the launchers of this user that take requests."""
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
    """Ask the launcher with this process id for so many processes; what it does, in words.

    Raises:
        UsageError: it cannot do that.
        LaunchError: there is no such launcher, or it does not answer.
    """
    try:
        with _connected(launcher) as connection:
            connection.send(msgspec.json.encode(Scale(wanted)))
            answer = from_json(connection.recv(_LONGEST), ControlReply)
    except (OSError, MalformedMessage) as error:
        raise LaunchError(f"process {launcher} is no `shoal run --max` that answers: {error}") from error
    if not answer.done:
        raise UsageError(answer.text)
    return answer.text


def _connected(launcher: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_PATIENCE)
    try:
        with _address(private_directory(), f"{_PREFIX}{launcher}") as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _address(directory: Path, name: str) -> Iterator[str]:
    """The address of a socket in ``directory``, whose own path may be longer than addresses may be."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
