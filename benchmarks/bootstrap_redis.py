"""A Redis for ``bootstrap.py``, and the ranks of ``bootstrap_ranks`` with sockets for Redis."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from bootstrap_ranks import Hub, Outcome
from bootstrap_ranks import meet as meet_in

from shoal.store.external.job import ExternalJob
from shoal.store.redis import connection as redis_link
from shoal.store.redis.store import RedisStore

_PR_SET_PDEATHSIG = 1
#: maximum number of connections of the server
CONNECTIONS = 30_000


def serve() -> None:
    """Exec Redis, which ends with the parent process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    print(port, flush=True)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    command = [
        "redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--tcp-backlog", "4096",
        "--dir", tempfile.gettempdir(), "--maxclients", str(CONNECTIONS),
    ]  # fmt: skip
    os.execvp(command[0], command)


class Socket:
    def __init__(self, sock: socket.socket, hub: Hub) -> None:
        sock.setblocking(False)
        self._sock, self._hub = sock, hub
        self._timeout = 60.0
        self.fileno, self.shutdown, self.close = sock.fileno, sock.shutdown, sock.close

    def settimeout(self, seconds: float) -> None:
        self._timeout = seconds

    def recv(self, count: int) -> bytes:
        while True:
            try:
                return self._sock.recv(count)
            except BlockingIOError:
                self._await(select.EPOLLIN)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                self._await(select.EPOLLOUT)

    def _await(self, events: int) -> None:
        if not self._hub.wait(self.fileno(), events, self._timeout):
            raise TimeoutError


@contextmanager
def cooperative(hub: Hub) -> Iterator[None]:
    """Context in which Redis connections wait in ``hub``; no thread keeps the job's keys alive."""

    class Connection(redis.Connection):
        def _connect(self) -> Any:
            return Socket(super()._connect(), hub)

    was = redis_link._connection_class, ExternalJob._keep
    redis_link._connection_class = lambda redis, tls: Connection
    ExternalJob._keep = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        redis_link._connection_class, ExternalJob._keep = was  # type: ignore[method-assign]


def meet(port: int, ranks: int, patience: float) -> Outcome:
    warnings.filterwarnings("ignore", "Redis at .* may lose changes")
    return meet_in(
        lambda: RedisStore(f"127.0.0.1:{port}", timeout=patience), ranks, 0.0, patience, cooperative
    )
