"""The processes of nodes that a master starts on its own machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from importlib import import_module

from .. import rpc
from ..errors import LaunchError, UnknownWorker
from ..store import TCPStoreServer
from ..wire import Deadline
from .naming import MASTER, node_name

#: seconds for a worker to end by itself
_END = 5.0
#: seconds between looks at whether a worker that has not joined is still there
_LOOK = 0.2


class Workers:
    """A store, the master's agent, and processes that end with this one.

    Attributes:
        agent: the master, as a worker of :mod:`shoal.rpc`.
        peers: the nodes.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()
        try:
            secret = secrets.token_hex(16)
            server = TCPStoreServer(secret=secret.encode()).start()
            self._stack.callback(server.close)
            self._stack.callback(self._end)
            environment = {**os.environ, "SHOAL_SECRET": secret}
            environment.pop("SHOAL_SECRET_FILE", None)
            threads = max(1, len(os.sched_getaffinity(0)) // count)
            for index in range(count):
                arguments = [node_name(index), server.url, str(threads)]
                command = [sys.executable, "-m", "shoal.controller.worker", *arguments]
                self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment))
            import_module(".prediction", __package__)  # it takes a second, as their start does
            self.agent = rpc.join(MASTER, url=server.url, secret=secret)
            self._stack.callback(self.agent.close, graceful=False)
            deadline = Deadline(timeout)
            self.peers = [self._joined(index, deadline) for index in range(count)]
        except BaseException:
            self.close()
            raise

    def _joined(self, index: int, deadline: Deadline) -> rpc.Peer:
        while True:
            try:
                return self.agent.peer(node_name(index), timeout=min(_LOOK, deadline.remaining()))
            except UnknownWorker:
                code = self._processes[index].poll()
                if code is not None:
                    raise LaunchError(
                        f"the process of node {index} ended with {code} before it joined: its output says why"
                    ) from None
                if deadline.expired:
                    raise LaunchError(
                        f"node {index} (process {self._processes[index].pid}) has not joined in time"
                    ) from None

    @property
    def pids(self) -> list[int]:
        """Of the nodes' processes."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the processes, and let go of everything."""
        self._stack.close()

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # which ends it, if the end of the connection did not
        deadline = Deadline(_END)
        for process in self._processes:
            try:
                process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
