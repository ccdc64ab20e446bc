"""A server for tests that sends each message back."""

from __future__ import annotations

import os

from shoal.net import ClientConnection, Connection, Server, connect, listen

SECRET = b"secret"


class EchoServer(Server[ClientConnection]):
    """Notes how many have proved themselves."""

    def __init__(self, *, handshake_timeout: float = 60.0) -> None:
        self.accepted = 0
        listener = listen("127.0.0.1", secret=SECRET)
        self.port: int = listener.getsockname()[1]
        super().__init__(
            listener,
            secret=SECRET,
            purpose="echo",
            limit=2**26,
            kind="echo",
            client_class=ClientConnection,
            handshake_timeout=handshake_timeout,
        )

    def on_authenticated(self, session: ClientConnection) -> None:
        self.accepted += 1

    def on_message(self, session: ClientConnection, message: bytearray) -> None:
        session.send(message)


def connect_echo(port: int, secret: bytes = SECRET, timeout: float = 60.0) -> Connection:
    return connect("127.0.0.1", port, secret=secret, purpose="echo", timeout=timeout, limit=2**26)


def echoes(port: int) -> None:
    """An honest client is served."""
    with connect_echo(port) as client:
        message = os.urandom(100)
        client.send(message, 30)
        assert client.recv(30) == message
