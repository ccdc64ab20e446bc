"""Forwarding of the nodes' output to the master's stdout and stderr, as whole lines prefixed by the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import sys
import threading
from typing import IO, TextIO

from ...common.lines import LineSplitter

#: capacity of each pipe in bytes, where the system allows it
PIPE_BYTES = 1 << 20
#: maximum bytes read from one pipe before the other pipes are served
CHUNK_BYTES = 1 << 16


class _NodePipe:
    """The stdout or stderr pipe of a node."""

    def __init__(self, index: int, pipe: IO[bytes], is_error: bool) -> None:
        self.pipe = pipe
        self._prefix = f"[node {index}] "
        self._is_error = is_error
        self._lines = LineSplitter()
        #: the latest update of a progress bar, written when its line ends
        self._update = b""

    def read(self) -> bool:
        """Forward one chunk; return False at the end of the pipe."""
        data = os.read(self.pipe.fileno(), CHUNK_BYTES)
        for text, end in self._lines.feed(data) if data else self._lines.close():
            if end == b"\r":
                self._update = text or self._update
            else:
                self._write(text or self._update)
                self._update = b""
        if not data and self._update:
            self._write(self._update)
        return bool(data)

    def _write(self, line: bytes) -> None:
        # Looked up each time: notebooks and tests replace these streams.
        sink: TextIO | None = sys.stderr if self._is_error else sys.stdout
        if sink is not None:
            text = f"{self._prefix}{line.decode(errors='replace')}\n"
            encoding = getattr(sink, "encoding", None) or "utf-8"
            with contextlib.suppress(BaseException):  # a closed stream, or user code that raises
                sink.write(text.encode(encoding, "backslashreplace").decode(encoding))
                sink.flush()


class NodeOutput:
    """Reads the pipes of all nodes in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reading, self._waking = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._reading, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._open_pipes = 0
        self._closing = False
        self._ended = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="shoal-node-output", daemon=True)
        self._thread.start()

    def attach(self, index: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Take over the pipes of a node; each is read to its end, then closed."""
        for pipe, is_error in ((stdout, False), (stderr, True)):
            with contextlib.suppress(OSError):  # the system allows less
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            with self._lock:
                self._open_pipes += 1
            self._selector.register(pipe, selectors.EVENT_READ, _NodePipe(index, pipe, is_error))
            os.write(self._waking, b"1")

    def close(self, timeout: float) -> None:
        """Forward the remaining output of the nodes, which have ended, and end the thread.

        Waits up to `timeout` seconds for children of the nodes that still hold the pipes open.
        """
        with self._lock:
            self._ended.wait_for(lambda: self._open_pipes == 0, timeout)
        self._closing = True
        os.write(self._waking, b"1")  # closing the pipe would not wake it if a forked child holds a copy
        self._thread.join()
        os.close(self._waking)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _NodePipe):
                key.data.pipe.close()
        self._selector.close()
        os.close(self._reading)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                stream: _NodePipe | None = key.data
                if stream is None:
                    os.read(self._reading, CHUNK_BYTES)
                    if self._closing:
                        return
                elif not stream.read():
                    self._selector.unregister(stream.pipe)
                    stream.pipe.close()
                    with self._lock:
                        self._open_pipes -= 1
                        self._ended.notify_all()
