"""Servers of Redis for tests, on this host alone.

They end with the process that runs the tests, also if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from .ports import free_port
from .waiting import until

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="there is no redis-server (Debian: redis-server)"
)

#: of a server that keeps what it acknowledges
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class RedisServer:
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
        self._log = folder / "redis.log"
        self._command = [
            "redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder),
            "--save", "", *(each.replace("PORT", str(self.port)) for each in options),
        ]  # fmt: skip
        self._plain = "--tls-port" not in options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
        until(self._answers, self._log.read_text)

    def kill(self) -> None:
        """End it without a warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let it stand still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

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
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as probe:
            if not self._plain:
                return True
            probe.sendall(b"PING\r\n")
            answer = probe.recv(16)
            return answer.startswith((b"+", b"-NOAUTH"))
        return False

    def __enter__(self) -> RedisServer:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
