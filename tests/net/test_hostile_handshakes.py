"""A rank's listener among strangers that speak its protocol, but do not hold the secret."""

from __future__ import annotations

import contextlib
import random
import socket
from concurrent.futures import ThreadPoolExecutor

from shoal.net import Acceptor, connect
from shoal.net.handshake import Handshake

from .acceptors import SECRET, acceptor, port

__all__ = ["acceptor"]  # a fixture


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next bytes that the other side sends; fewer only if it ends."""
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def _hostile(acceptor: Acceptor, kind: int, chance: random.Random, recorded: list[bytes]) -> bytes:
    """A handshake that must fail; what the other side said beyond its greeting."""
    secret, purpose = (b"wrong" if kind == 0 else SECRET), ("other" if kind == 1 else "test")
    mine = Handshake(connecting=True, secret=secret, purpose=purpose)
    greeting = bytearray(mine.greeting)
    if kind == 2:
        place = chance.randrange(8 * (len(greeting) - 32))  # not what is random
        greeting[place // 8] ^= 1 << place % 8
    said = b""
    with (
        socket.create_connection(("127.0.0.1", port(acceptor)), timeout=60) as sock,
        contextlib.suppress(OSError),  # it may be dropped at any moment
    ):
        if kind == 3:
            sock.sendall(b"".join(recorded))
        else:
            sock.sendall(greeting)
            theirs = exactly(sock, mine.needed)
            proof = bytearray(mine.feed(theirs) or bytes(32))
            if kind == 4:
                proof[chance.randrange(32)] ^= 1 << chance.randrange(8)
            if kind == 5:
                proof = bytearray(chance.randbytes(2**16))
            sock.sendall(proof)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(2**16):
            said += data
    return said[mine.needed :] if kind == 3 else said


def test_a_thousand_hostile_handshakes_let_nobody_in(acceptor: Acceptor) -> None:
    chance = random.Random(0)
    mine = Handshake(connecting=True, secret=SECRET, purpose="test")
    with ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", port(acceptor)), timeout=60) as sock:
            accepting = pool.submit(acceptor.accept, 60)
            sock.sendall(mine.greeting)
            proof = mine.feed(exactly(sock, len(mine.greeting)))
            sock.sendall(proof)
            assert exactly(sock, 32) != bytes(32)
            accepting.result(60).close()
        accepting = pool.submit(acceptor.accept, 900)
        for number in range(1000):
            said = _hostile(acceptor, number % 6, chance, [mine.greeting, proof])
            assert said in (b"", bytes(32)), number
        assert not accepting.done()
        with connect("127.0.0.1", port(acceptor), secret=SECRET, purpose="test", timeout=30) as honest:
            honest.send(b"honest", 30)
            with accepting.result(60) as accepted:
                assert accepted.recv(30) == b"honest"
