"""The node processes that a master starts on its machine; they end with the master."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from ...errors import LaunchError
from ...net import Deadline, close_in_forked_child
from .output import NodeOutput

#: seconds for workers to end by themselves, and then for their output to arrive
END_TIMEOUT_S = 5.0


#: Runs a node with the import path of its master. With ``-m`` the path would start with the working
#: directory, where a ``queue.py`` would hide Python's.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; del sys.argv[4:]; "
    "from shoal.controller.node.serving import serve_process; "
    "serve_process(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))"
)


class NodeProcesses:
    """Starts node processes, which join at the store `url`; `count` of them share this process's cores."""

    def __init__(self, url: str, secret: bytes, count: int) -> None:
        self._url = url
        self._threads = max(1, len(os.sched_getaffinity(0)) // count)
        self._secret = secret
        self._output = NodeOutput()
        #: the latest process of each node, and the nodes whose process has not joined
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._awaited: set[int] = set()

    def start(self, index: int) -> None:
        """Start a process that becomes node `index`; an earlier process of this index is ended first."""
        self._end([index])
        path = [each for each in sys.path if isinstance(each, str)]  # Python ignores other entries
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(index), self._url, str(self._threads), *path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._started[index] = process
        self._awaited.add(index)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            close_in_forked_child(pipe)  # otherwise an open copy would hide the master's end from the worker
        self._output.attach(index, process.stdout, process.stderr)
        with contextlib.suppress(BrokenPipeError):  # it ended already: raise_if_ended() raises
            process.stdin.write(self._secret.hex().encode())
            process.stdin.flush()

    def is_started(self, index: int) -> bool:
        """Return whether node `index` was started here."""
        return index in self._started

    def mark_joined(self, index: int) -> None:
        """Note that the process of node `index` joined."""
        self._awaited.discard(index)

    def raise_if_ended(self, index: int) -> None:
        """Raise LaunchError if the process of node `index` or one that has not joined has ended."""
        for each in (index, *sorted(self._awaited)):
            code = self._started[each].poll()
            if code is not None:
                raise LaunchError(
                    f"the process of node {each} ended with {code} before it joined: see its output"
                )

    def close(self) -> None:
        """End all processes, after the connections to them were closed."""
        self._end(list(self._started))
        self._output.close(END_TIMEOUT_S)

    def _end(self, indices: list[int]) -> None:
        ending = [(index, self._started.pop(index)) for index in indices if index in self._started]
        for index, process in ending:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # ends it, if the end of the connection did not
            if index in self._awaited:
                self._awaited.remove(index)
                process.kill()  # it has no state, and may read its input only after some seconds
            else:
                process.send_signal(signal.SIGCONT)  # it may be stopped
        deadline = Deadline(END_TIMEOUT_S)
        for _, process in ending:
            try:
                process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
