"""Somebody in between: passes on what two sides say to each other, reads it, and may change it."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable

from shoal.net.handshake import Handshake
from shoal.net.tls.certificates import tls_config

GREETING = len(Handshake(connecting=True, secret=b"", purpose="x").greeting)


class Relay:
    """Listens at ``port`` and passes on to another port, one connection after the other; a context.

    Args:
        to: the port of the server.
        terminates: end the TLS of both sides, with a certificate of its own, and so read what is in it.
        change: is given each greeting, and gives what is passed on.
    """

    def __init__(
        self,
        to: int,
        *,
        terminates: bool = False,
        change: Callable[[bytes], bytes] = lambda greeting: greeting,
    ) -> None:
        self._to = to
        self._terminates = terminates
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: what has passed after the greetings, as the relay could read it
        self.read = bytearray()
        #: how often TLS was ended on both sides
        self.terminated = 0
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._stopped], [], [])
            if self._stopped in ready:
                return
            client, _ = self._listener.accept()
            with client, socket.create_connection(("127.0.0.1", self._to)) as server:
                for each in (client, server):
                    each.settimeout(30)
                with contextlib.suppress(OSError):
                    self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        for source, sink in ((client, server), (server, client)):
            greeting = b""
            while len(greeting) < GREETING:
                data = source.recv(GREETING - len(greeting))
                if not data:
                    return
                greeting += data
            sink.sendall(self._change(greeting))
        if not self._terminates:
            self._pump(client, server)
            return
        near = tls_config(connecting=False).context.wrap_socket(client, server_side=True)
        far = tls_config(connecting=True).context.wrap_socket(server)
        with near, far:
            self.terminated += 1
            self._pump(near, far)

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        while True:
            ready = [each for each in other if isinstance(each, ssl.SSLSocket) and each.pending()]
            if not ready:
                ready, _, _ = select.select([*other, self._stopped], [], [])
            for source in ready:
                if source is self._stopped:
                    return
                data = source.recv(2**16)
                if not data:
                    return
                self.read += data
                other[source].sendall(data)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join(60)
        self._stopped.close()
        self._listener.close()
