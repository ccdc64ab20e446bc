"""A job meets while strangers sit on every one of its listeners: they delay nobody and join nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from shoal import AuthenticationError, Membership, TCPStore, WireError
from shoal import net as wire
from shoal.backend.native import mesh
from shoal.net import HANDSHAKE_TIMEOUT_S, Deadline
from shoal.net.authentication import authenticate
from shoal.net.handshake import Handshake
from shoal.rendezvous import rendezvous, user_secret
from tests.leaks import nothing_left_behind
from tests.support.other_user import as_nobody, needs_root
from tests.support.ports import free_port

SIZE = 3
#: of each kind on each listener
STRANGERS = 20

Dial = Callable[[], socket.socket]


@pytest.fixture(autouse=True)
def _own_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.delenv("SHOAL_SECRET_FILE", raising=False)


@pytest.fixture
def memory() -> Iterator[mesh.OfferedMemory]:
    fd = os.memfd_create("test")
    yield mesh.OfferedMemory(fd, 4096, [0] * SIZE)
    os.close(fd)


def _silent(dial: Dial, purpose: str) -> socket.socket:
    return dial()


def _babbling(dial: Dial, purpose: str) -> socket.socket:
    stranger = dial()
    with contextlib.suppress(OSError):  # it may be thrown out in the middle
        for _ in range(10):
            stranger.sendall(os.urandom(1000))
    return stranger


def _greeting(dial: Dial, purpose: str) -> socket.socket:
    stranger = dial()
    stranger.sendall(Handshake(connecting=True, secret=b"", purpose=purpose).greeting)
    return stranger


def _flood(stack: contextlib.ExitStack, dial: Dial, purpose: str) -> None:
    for kind in (_silent, _babbling, _greeting):
        for _ in range(STRANGERS):
            stack.enter_context(kind(dial, purpose))


def _prove(sock: socket.socket, purpose: str, secret: bytes) -> wire.Connection:
    """Speak the protocol, as any process can that has shoal."""
    return authenticate(sock, True, secret, purpose, Deadline(30), 1000)


def _tcp(port: int) -> Dial:
    return lambda: socket.create_connection(("127.0.0.1", port), timeout=30)


def _unix(name: str) -> Dial:
    def dial() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        sock.connect(b"\0" + name.encode())
        return sock

    return dial


def _addresses(member: Membership) -> list[mesh._Address]:
    raw = member.store.multi_get([f"mesh/{rank}" for rank in range(SIZE - 1)], 30)
    return [msgspec.msgpack.decode(each, type=mesh._Address) for each in raw]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_strangers_on_every_listener_delay_a_meeting_by_less_than_their_deadline(
    transport: str, port: int, memory: mesh.OfferedMemory
) -> None:
    def meet(rank: int) -> Membership:
        return rendezvous(f"tcp://127.0.0.1:{port}", rank=rank, size=SIZE, timeout=60)

    def connect(member: Membership) -> mesh.Mesh:
        return mesh.connect(member, memory, transport=transport, timeout=60)

    with nothing_left_behind(), ThreadPoolExecutor(2 * SIZE) as pool, contextlib.ExitStack() as stack:
        early = [pool.submit(meet, rank) for rank in range(SIZE - 1)]
        TCPStore("127.0.0.1", port, user_secret(), timeout=30).close()  # it is served by now
        began = time.monotonic()
        _flood(stack, _tcp(port), "store")
        with pytest.raises(AuthenticationError):
            _prove(_tcp(port)(), "store", b"")
        last = meet(SIZE - 1)
        members = [*(each.result(30) for each in early), last]
        assert {member.secret for member in members} == {user_secret()}
        assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S

        meshes = [pool.submit(connect, member) for member in members[:-1]]
        listeners = [d for a in _addresses(last) for d in (_tcp(a.port), _unix(a.unix))]
        began = time.monotonic()
        # All of them stand in the queue before the rank that the others wait for.
        for dial in listeners:
            _flood(stack, dial, "mesh")
        without = [pool.submit(_prove, dial(), "mesh", b"") for dial in listeners]
        connected = [connect(last), *(each.result(30) for each in meshes)]
        assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S
        for refused in without:
            assert isinstance(refused.exception(30), WireError)  # refused, or the listener was done before
        for each in connected:
            assert len(each.local if transport == "auto" else each.remote) == SIZE - 1
            each.close()
        leaving = [pool.submit(member.release, 10.0) for member in members]
        for each in leaving:
            each.result(30)


@needs_root
def test_ranks_of_two_users_that_hold_one_secret_share_no_memory(
    port: int, memory: mesh.OfferedMemory
) -> None:
    def connect(rank: int) -> tuple[int, int]:
        url = f"tcp://127.0.0.1:{port}"
        member = rendezvous(url, rank=rank, size=2, secret="of both", timeout=60)
        connected = mesh.connect(member, memory, transport="auto", timeout=60)
        counts = (len(connected.local), len(connected.remote))
        connected.close()
        member.release(10.0)
        return counts

    with nothing_left_behind(), ThreadPoolExecutor(1) as pool:
        mine = pool.submit(connect, 0)
        assert as_nobody(lambda: connect(1)) == (0, 1)
        assert mine.result(60) == (0, 1)


def test_a_rank_that_stops_in_the_middle_of_its_introduction_does_not_keep_the_others_out(
    port: int, memory: mesh.OfferedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 1.5)  # enough for those who do not stop
    with nothing_left_behind(), ThreadPoolExecutor(2 * SIZE) as pool:
        members = list(
            pool.map(
                lambda rank: rendezvous(f"tcp://127.0.0.1:{port}", rank=rank, size=SIZE, timeout=60),
                range(SIZE),
            )
        )
        early = [
            pool.submit(mesh.connect, member, memory, transport="tcp", timeout=60) for member in members[:-1]
        ]
        queued = [_tcp(address.port)() for address in _addresses(members[-1])]
        stopped = [pool.submit(_prove, sock, "mesh", user_secret()) for sock in queued]
        connected = mesh.connect(members[-1], memory, transport="tcp", timeout=60)
        for each in (connected, *(each.result(60) for each in early)):
            each.close()
        for each in stopped:
            if each.exception(60) is None:  # it may have been let go when all were there
                each.result().close()
        for leaving in [pool.submit(member.release, 10.0) for member in members]:
            leaving.result(30)
