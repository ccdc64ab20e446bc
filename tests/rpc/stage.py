"""A store and the workers that meet in it: agents of this process, or processes of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from shoal.rpc import Agent, join
from shoal.store import TCPStore, TCPStoreServer
from shoal.testing import faults
from shoal.testing.processes import fork_server
from tests.support.frozen import frozen

SECRET = "a secret of these tests"
#: whether this process, which is a worker, is to end
leaving = threading.Event()


class Stage(contextlib.ExitStack):
    """A store and its workers, which end with the block."""

    def __init__(self) -> None:
        super().__init__()
        server = TCPStoreServer(secret=SECRET.encode()).start()
        self.callback(server.close)
        self.url = server.url
        self.store = TCPStore(server.host, server.port, SECRET.encode())
        self.callback(self.store.close)
        self.processes: dict[str, Any] = {}

    def join(self, name: str, **how: Any) -> Agent:
        """An agent of this process."""
        return self.enter_context(join(name, url=self.url, secret=SECRET, **how))

    def start(self, name: str, *, target: Callable[..., None] | None = None, **how: Any) -> int:
        """A worker that is a process; its process id.

        Args:
            target: what the process does; None: :func:`serve`.
        """
        process = fork_server().Process(target=target or serve, args=(self.url, name, how), name=name)
        process.start()
        self.processes[name] = process
        self.callback(_end, process)
        return process.pid or 0

    def kill(self, name: str) -> None:
        """End a worker's process at once, unless it has ended."""
        if self.processes[name].is_alive():
            faults.kill(self.processes[name].pid)


def serve(url: str, name: str, how: dict[str, Any]) -> None:
    """Be a worker until somebody calls :func:`leave`."""
    with frozen(), join(name, url=url, secret=SECRET, **how):
        leaving.wait()


def leave() -> None:
    """End the worker's process in good order."""
    leaving.set()


def _end(process: Any) -> None:
    with contextlib.suppress(ValueError):  # it is closed
        if process.is_alive():
            process.kill()
        process.join(10)
        process.close()
