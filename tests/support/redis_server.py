"""Servers of Redis for tests, on this host alone."""

from __future__ import annotations

import contextlib
import shutil
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from .ports import free_port
from .server_process import ServerProcess

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="there is no redis-server (Debian: redis-server)"
)

#: of a server that keeps what it acknowledges
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class RedisServer(ServerProcess):
    """One server; a context, which ends it.

    Args:
        folder: for its data.
        options: further ones of the program; ``--port 0`` in them: it talks TLS alone.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"redis://{self.address}"
        command = [
            "redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder),
            "--save", "", *(each.replace("PORT", str(self.port)) for each in options),
        ]  # fmt: skip
        self._plain = "--tls-port" not in options
        super().__init__(command, folder / "redis.log")

    def ask(self, *words: Any, **options: Any) -> Any:
        """What it answers to one command, with bytes."""
        import redis

        with redis.Redis("127.0.0.1", self.port, **options) as client:
            return client.execute_command(*words)

    def names(self, job: str) -> list[bytes]:
        """The keys that it holds of a job."""
        found: list[bytes] = self.ask("KEYS", f"{{shoal:{quote(job)}}}*")
        return found

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as probe:
            if not self._plain:
                return True
            probe.sendall(b"PING\r\n")
            answer = probe.recv(16)
            return answer.startswith((b"+", b"-NOAUTH"))
        return False
