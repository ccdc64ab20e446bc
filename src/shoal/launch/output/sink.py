"""Writers of lines to the launcher's stdout and stderr.

If stdout and stderr are the same file (a terminal, or ``2>&1``) they share a :class:`Sink`, so that lines are
not mixed.  At most one line is *open*: drawn but not finished, such as a progress bar or a prompt.  When
another rank writes a line,

- on a terminal the open line is erased, and drawn again below the new line;
- elsewhere the open line is ended first.

A thread writes, because a reader that does not read (``| less``) must not delay exits and signals.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable

_ERASE = b"\r\x1b[K"
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
#: codes that erase parts of a line; removed, as they would erase the prefix, and each drawing erases the line
_ERASING = re.compile(rb"\x1b\[[012]?K")

#: number of queued bytes above which the pipes of ranks are not read
_MAX_BACKLOG_BYTES = 4 << 20


class DescriptorWriter:
    """Writes bytes to ``fd``, which stays open, on a separate thread, in order.

    The thread calls ``wake`` when the queue has room again, and when the thread ends.
    """

    def __init__(self, fd: int, wake: Callable[[], None]) -> None:
        self._fd = fd
        self._wake = wake
        self._queue: deque[bytes] = deque()
        self._waiting = 0
        self._closing = False
        self._changed = threading.Condition()
        #: the reader has closed the file, and lines are dropped
        self.broken = False
        #: the error because of which lines are dropped, such as a full disk; "": none
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="shoal-output", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue ``data``; never blocks."""
        with self._changed:
            if not (self.broken or self.trouble):
                self._queue.append(data)
                self._waiting += len(data)
                self._changed.notify()

    @property
    def full(self) -> bool:
        """Whether too many bytes are queued to write more now."""
        return self._waiting > _MAX_BACKLOG_BYTES

    def join(self, timeout: float) -> bool:
        """Wait until everything is written (or dropped) and the thread has ended; return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread once the queue is written; does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                data = b"".join(self._queue)
                self._queue.clear()
            if not data:
                break
            try:
                self._write_all(data)
            except OSError as error:
                with self._changed:
                    if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                        self.broken = True
                    else:  # a full disk, a terminal that was closed
                        self.trouble = error.strerror or str(error)
                    self._queue.clear()
                    self._waiting = 0
                self._wake()
                continue
            with self._changed:
                was_full = self.full
                self._waiting -= len(data)
            if was_full:
                self._wake()
        self._wake()

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process has made the file non-blocking
                waiting = select.poll()
                waiting.register(self._fd, select.POLLOUT)
                waiting.poll()


class Sink:
    """Writes whole lines of several sources to one file, which may be a terminal.

    A *source* is any object that identifies one stream of one rank.
    """

    def __init__(self, fd: int, wake: Callable[[], None], *, terminal: bool) -> None:
        self.writer = DescriptorWriter(fd, wake)
        self.terminal = terminal
        self._open: object | None = None
        self._drawn = b""
        self._cursor_hidden = False

    def line(self, source: object, prefix: bytes, text: bytes, end: bytes) -> None:
        """Write a line of a source, or an update of its open line if ``end`` is ``\\r``."""
        if not self.terminal:
            if self._open not in (None, source):
                self.writer.write(b"\n")
            self.writer.write(prefix + text + end)
            self._open = source if end == b"\r" else None
        elif end == b"\r":
            if text:
                self.draw(source, prefix, text)
        else:
            mine = self._open is source
            erase = _ERASE if self._open is not None else b""
            if mine:
                self._open = None
            again = self._drawn if self._open is not None else b""
            self.writer.write(erase + prefix + self._clean(text) + b"\n" + again)

    def draw(self, source: object, prefix: bytes, text: bytes) -> None:
        """Show ``text`` on a terminal as the open line, instead of the previous open line."""
        drawn = _WRAP_OFF + prefix + self._clean(text) + _WRAP_ON
        self.writer.write((_ERASE if self._open is not None else b"") + drawn)
        self._open, self._drawn = source, drawn

    def close(self) -> None:
        """Finish an open line, and end the writer once everything is written."""
        if self._open is not None:
            self.writer.write(b"\n")
            self._open = None
        if self._cursor_hidden:
            self.writer.write(_SHOW_CURSOR)
        self.writer.close()

    def _clean(self, text: bytes) -> bytes:
        if b"\x1b" not in text:
            return text
        self._cursor_hidden |= _HIDE_CURSOR in text
        return _ERASING.sub(b"", text)


def open_sinks(wake: Callable[[], None]) -> tuple[Sink, Sink]:
    """The sinks of stdout and stderr of this process; the same sink if both are the same file."""
    out = Sink(1, wake, terminal=is_terminal(1))
    if os.path.sameopenfile(1, 2):
        return out, out
    return out, Sink(2, wake, terminal=is_terminal(2))


def is_terminal(fd: int) -> bool:
    """Whether ``fd`` is a terminal that understands control sequences."""
    return os.isatty(fd) and os.environ.get("TERM") != "dumb"
