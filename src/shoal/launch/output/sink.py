"""Where the ranks' lines go: the launcher's own stdout and stderr.

A :class:`Sink` stands for one file.  When stdout and stderr are the same file (a terminal, or
``2>&1``) they share a sink, so that lines never meet in the middle.  At most one line is *open*:
drawn, but not finished, as progress bars and prompts are.  When another rank has something to say,

- on a terminal the open line is erased, and drawn again beneath what is said;
- elsewhere it is ended first.

Writing happens in a thread, because a reader that does not read (``| less``) must not keep the
launcher from seeing exits and signals.
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
#: codes that erase parts of a line: on a terminal each drawing erases it anyway, prefix included
_ERASING = re.compile(rb"\x1b\[[012]?K")

#: with more than this waiting to be written, the ranks' pipes are left unread
_ENOUGH = 4 << 20


class DescriptorWriter:
    """Writes bytes to a descriptor from a thread of its own, in order.

    Args:
        fd: where to; stays open.
        wake: called from the thread when there is room again, and when it has ended.
    """

    def __init__(self, fd: int, wake: Callable[[], None]) -> None:
        self._fd = fd
        self._wake = wake
        self._queue: deque[bytes] = deque()
        self._waiting = 0
        self._closing = False
        self._changed = threading.Condition()
        #: nobody reads any more; lines are dropped
        self.broken = False
        #: why lines cannot be written and are dropped, such as a full disk; "": they can
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
        """Too much is waiting: do not write more for now."""
        return self._waiting > _ENOUGH

    def join(self, timeout: float) -> bool:
        """Wait until all was written (or can never be) and the thread is gone; whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread once everything queued is written; returns at once."""
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
            except BlockingIOError:  # another process that has the file made it non-blocking
                waiting = select.poll()
                waiting.register(self._fd, select.POLLOUT)
                waiting.poll()


class Sink:
    """Puts lines of several sources into one file, whole.

    Args:
        fd: the file.
        wake: see :class:`DescriptorWriter`.
        terminal: draw open lines again, as a terminal allows.

    A *source* is any object that tells one stream of one rank from the others.
    """

    def __init__(self, fd: int, wake: Callable[[], None], *, terminal: bool) -> None:
        self.writer = DescriptorWriter(fd, wake)
        self.terminal = terminal
        self._open: object | None = None
        self._drawn = b""
        self._cursor_hidden = False

    def line(self, source: object, prefix: bytes, text: bytes, end: bytes) -> None:
        """Write one piece of a source: a whole line, or with ``\\r`` for an end, an update of one."""
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
        """On a terminal: show ``text`` as the open line, in place of what was open."""
        drawn = _WRAP_OFF + prefix + self._clean(text) + _WRAP_ON
        self.writer.write((_ERASE if self._open is not None else b"") + drawn)
        self._open, self._drawn = source, drawn

    def close(self) -> None:
        """Finish an open line, and end the writer once all is written."""
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
    """The sinks of this process's stdout and stderr; one and the same if the files are."""
    out = Sink(1, wake, terminal=is_terminal(1))
    if os.path.sameopenfile(1, 2):
        return out, out
    return out, Sink(2, wake, terminal=is_terminal(2))


def is_terminal(fd: int) -> bool:
    """Whether ``fd`` is a terminal that understands control sequences."""
    return os.isatty(fd) and os.environ.get("TERM") != "dumb"
