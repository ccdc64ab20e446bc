"""A store in a separate process, `shoal store`, that a test can kill."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ..errors import OutOfResources

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
#: ends with the test process (PR_SET_PDEATHSIG), and imports nothing from the working directory
_PROGRAM = (
    "import sys; sys.path[0] or sys.path.pop(0); import ctypes, runpy; "
    "ctypes.CDLL(None).prctl(1, 9); sys.argv[0] = 'shoal'; "
    "runpy.run_module('shoal', run_name='__main__')"
)


class StoreProcess:
    """`shoal store` on a port of 127.0.0.1; `url`, `host` and `port` are its address."""

    def __init__(self, secret: str, size: int) -> None:
        self.host = "127.0.0.1"
        self.port = _free_port()
        self.url = f"tcp://{self.host}:{self.port}"
        self._secret, self._size = secret, size
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start serving, with the job's record only; return when clients can connect."""
        if self._process is not None:
            return
        command = [sys.executable, "-c", _PROGRAM, "store", "--listen", f"{self.host}:{self.port}"]
        self._process = subprocess.Popen(
            [*command, "--size", str(self._size)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SHOAL_SECRET": self._secret},
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.kill()
            raise OutOfResources(f"`shoal store` did not start to serve {self.url}")

    def kill(self) -> None:
        """Kill the process (SIGKILL); the contents of the store are lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    close = kill


def _free_port() -> int:
    """Find a port outside the ephemeral range, so that it stays free while the store is down."""
    first = int(_EPHEMERAL.read_text().split()[0])
    low, high = (10_000, first) if first > 11_000 else (1024, 65_536)
    for _ in range(_TRIES):
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(low, high)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OutOfResources("found no free port of 127.0.0.1 for a store")
