"""Who is at each end of a connection, and the memory of each."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from shoal.errors import WireError
from shoal.net import (
    Connection,
    PeerConnection,
    connect,
    connect_unix,
    listen,
    listen_unix,
    receive_hello,
    send_hello,
)
from shoal.testing import no_leaks

from .accepting import accept


class Name(msgspec.Struct):
    name: str


def over(
    family: str, left: Callable[[Connection], Any], right: Callable[[Connection], Any]
) -> tuple[Any, Any]:
    """Run both ends of a connection; ``left`` made it."""
    unix = f"shoal-test-{secrets.token_hex(8)}"
    with (
        listen_unix(unix) if family == "unix" else listen("127.0.0.1") as listener,
        ThreadPoolExecutor(1) as pool,
    ):

        def end() -> Any:
            with accept(listener, secret=b"", purpose="test", timeout=20) as connection:
                return right(connection)

        answer = pool.submit(end)
        if family == "unix":
            made = connect_unix(unix, secret=b"", purpose="test", timeout=20)
        else:
            made = connect("127.0.0.1", listener.getsockname()[1], secret=b"", purpose="test", timeout=20)
        with made:
            return left(made), answer.result(20)


@pytest.mark.parametrize("sends_process", [True, False])
def test_a_side_can_name_the_process_that_it_connects_for(sends_process: bool) -> None:
    """As the helper of a C++ program does."""
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def left(connection: Connection) -> int:
        fd, process_fd = os.memfd_create("mine"), os.pidfd_open(program.pid)
        with contextlib.closing(send_hello(connection, Name("left"), 20)) as peer:
            peer.share_memory([fd, process_fd if sends_process else fd], 20)
        os.close(fd)
        os.close(process_fd)
        return peer.pid

    def right(connection: Connection) -> int | str:
        fd = os.memfd_create("mine")
        with contextlib.closing(receive_hello(connection, Name, lambda _: Name("right"), 20)) as peer:
            try:
                peer.share_memory([fd], 20, with_process=True)
                return peer.pid
            except WireError as error:
                return str(error)
            finally:
                os.close(fd)

    with no_leaks():
        named = (
            program.pid if sends_process else "received a descriptor that does not refer to a running process"
        )
        assert over("unix", left, right) == (os.getpid(), named)
    program.communicate(b"\n")


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_both_ends_learn_who_the_other_is_and_local_ones_share_memory(family: str) -> None:
    def exchanged(peer: PeerConnection[Name], text: bytes) -> tuple[Name, bytes | None]:
        with contextlib.closing(peer):
            if not peer.is_local:
                return peer.hello, None
            fd = os.memfd_create("mine")
            try:
                os.write(fd, text)
                peer.share_memory([fd], 20)
            finally:
                os.close(fd)
            assert peer.pid == os.getpid()
            return peer.hello, os.pread(peer.memory_fd, 100, 0)

    def left(connection: Connection) -> tuple[Name, bytes | None]:
        return exchanged(send_hello(connection, Name("left"), 20), b"of left")

    def right(connection: Connection) -> tuple[Name, bytes | None]:
        peer = receive_hello(connection, Name, lambda theirs: Name(f"answers {theirs.name}"), 20)
        return exchanged(peer, b"of right")

    with no_leaks():
        seen = over(family, left, right)
    local = family == "unix"
    assert seen == (
        (Name("answers left"), b"of right" if local else None),
        (Name("left"), b"of left" if local else None),
    )


def test_whoever_speaks_in_other_words_is_refused() -> None:
    def right(connection: Connection) -> None:
        with pytest.raises(WireError, match="received an invalid hello from"):
            receive_hello(connection, Name, lambda theirs: theirs, 20)

    over("tcp", lambda connection: connection.send(b"\x01", 20), right)
