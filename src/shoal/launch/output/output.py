"""Copies the output of ranks to the launcher's stdout and stderr, and to log files."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ...common.lines import LineSplitter
from ...errors import LaunchError
from ..ranks.environment import prefix
from ..ranks.rank import JobProcess
from ..ranks.source import OutputSource
from .sink import Sink, open_sinks

#: seconds until an unfinished line (a prompt) is shown on a terminal
_IDLE_FLUSH_S = 0.1
#: ANSI colours of the prefixes of successive ranks, all readable on black and on white
_COLOURS = (36, 33, 35, 32, 34, 31)


class _RankPipe:
    def __init__(self, source: OutputSource, prefix: bytes, sink: Sink, log: Callable[[bytes], None]) -> None:
        self.source = source
        self.prefix = prefix
        self.sink = sink
        self._log = log
        self.lines = LineSplitter()
        #: the time to show an unfinished line; None: there is none
        self.show_at: float | None = None

    def take(self, data: bytes) -> None:
        for text, end in self.lines.feed(data):
            self._put(text, end)
        if not (self.sink.terminal and self.lines.partial):
            self.show_at = None
        elif self.lines.redrawing:
            self.show_at = 0.0
        elif self.show_at is None:
            self.show_at = time.monotonic() + _IDLE_FLUSH_S

    def show(self) -> None:
        self.show_at = None
        self.sink.draw(self, self.prefix, self.lines.partial)

    def end(self) -> None:
        for text, end in self.lines.close():
            self._put(text, end)
        self.show_at = None
        self.source.close()

    def _put(self, text: bytes, end: bytes) -> None:
        self.sink.line(self, self.prefix, text, end)
        self._log(text + end)


class RankOutput:
    """Reads the pipes of all ranks and writes whole, prefixed lines.

    Args:
        selector: the selector of the loop, which calls the data of ready keys.
        wake: makes the loop call :meth:`resume`; called on other threads.
        logs: log files to which the lines of each rank are written too.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
        size: int,
        *,
        prefix_lines: bool = True,
        logs: Logs | None = None,
    ) -> None:
        self._selector = selector
        self._prefix_lines = prefix_lines
        self._logs = logs
        self._size = size
        self._out, self._err = open_sinks(wake)
        self._streams: list[_RankPipe] = []
        self._paused: list[_RankPipe] = []
        self._stderr: dict[int, LineSplitter] = {}
        #: the sinks that cannot be written and were reported to the user
        self._troubled: list[Sink] = []
        self._closed = False

    def attach(self, rank: JobProcess) -> None:
        """Take ownership of the pipes of a rank: read them to the end, then close them."""
        if rank.restart:
            process = f" (process {rank.pid})" if rank.pid else ""  # not known yet on another host
            self._log(rank.slot, f"--- rank {rank.name}{process} ---\n".encode())
        for source, sink in ((rank.stdout, self._out), (rank.stderr, self._err)):
            label = _label(rank, self._size, sink) if self._prefix_lines else b""
            stream = _RankPipe(source, label, sink, partial(self._log, rank.slot))
            self._streams.append(stream)
            self._listen(stream)
        self._stderr[rank.index] = stream.lines

    def _log(self, slot: int, data: bytes) -> None:
        trouble = None if self._logs is None else self._logs.write(slot, data)
        if trouble is not None:
            self.say(f"shoal: the log of rank {slot} ends here: {trouble}".encode())

    def tail(self, rank: JobProcess) -> Sequence[bytes]:
        """The last lines of a rank's stderr, even if another process has its slot now."""
        return self._stderr[rank.index].tail

    def say(self, text: bytes) -> None:
        """Write a message of the launcher, of whole lines, to stderr and its log."""
        for line in text.splitlines():
            self._err.line(self, b"", line, b"\n")
        if self._logs is not None:
            trouble = self._logs.write(LAUNCHER, text + (b"" if text.endswith(b"\n") else b"\n"))
            if trouble is not None:
                self.say(f"shoal: the log of the launcher ends here: {trouble}".encode())

    def next_show(self) -> float | None:
        """The time of the next :meth:`show`, if any."""
        return min((s.show_at for s in self._streams if s.show_at is not None), default=None)

    def show(self) -> None:
        """Show the unfinished lines that are due."""
        now = time.monotonic()
        for stream in self._streams:
            if stream.show_at is not None and stream.show_at <= now:
                stream.show()

    def resume(self) -> None:
        """Read again from pipes that were paused while a sink was full."""
        if not self._closed:  # afterwards the message would be lost
            for text in self.new_troubles():
                self.say(text)
        paused, self._paused = self._paused, []
        for stream in paused:
            self._listen(stream)

    def drain(self) -> None:
        """Read the rest of every pipe and close it, even if another process still holds its other end."""
        self.resume()
        for stream in list(self._streams):
            while stream in self._streams and self._read_once(stream):
                pass
            if stream in self._streams:
                self._end(stream)

    def close(self) -> None:
        """Accept no more lines; queued lines are still written."""
        self._closed = True
        self._out.close()
        if self._err is not self._out:
            self._err.close()

    @property
    def ended(self) -> bool:
        """Whether, after :meth:`close`, all lines have been written."""
        return self._out.writer.join(0.0) and self._err.writer.join(0.0)

    def new_troubles(self) -> list[bytes]:
        """Messages on files that cannot be written any more, each once."""
        found = []
        for name, sink in (("stdout", self._out), ("stderr", self._err)):
            trouble = sink.writer.trouble
            if trouble and sink not in self._troubled:
                self._troubled.append(sink)
                text = f"shoal: {name} cannot be written: {trouble}; output is lost from here on"
                found.append(f"{text}, and the job goes on".encode())
        return found

    @property
    def lost(self) -> bool:
        return bool(self._out.writer.trouble or self._err.writer.trouble)

    def _listen(self, stream: _RankPipe) -> None:
        stream.source.listen(self._selector, partial(self._read, stream))

    def _read(self, stream: _RankPipe) -> None:
        if stream.sink.writer.full:
            stream.source.ignore()
            self._paused.append(stream)
        else:
            self._read_once(stream)

    def _read_once(self, stream: _RankPipe) -> bool:
        try:
            data = stream.source.read()
        except BlockingIOError:
            return False
        # If the launcher's output has no reader any more, the rank gets SIGPIPE, as without a launcher.
        if not data or stream.sink.writer.broken:
            self._end(stream)
            return False
        stream.take(data)
        return True

    def _end(self, stream: _RankPipe) -> None:
        stream.source.ignore()
        self._streams.remove(stream)
        stream.end()


def _label(rank: JobProcess, size: int, sink: Sink) -> bytes:
    text = prefix(rank.name, size)
    if sink.terminal and not os.environ.get("NO_COLOR"):
        text = f"\x1b[{_COLOURS[rank.slot % len(_COLOURS)]}m{text.rstrip()}\x1b[0m "
    return text.encode()


#: the launcher, as an argument for a rank
LAUNCHER = -1

#: values instead of a descriptor
_ENDED, _NOT_YET = -1, -2


class Logs:
    """The files ``launcher.log``, ``rank0.log``, ``rank1.log`` and so on in a directory.

    Args:
        directory: created if it does not exist; raises LaunchError if it cannot be written to.
        size: number of initial ranks; files of other processes are created when they write.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._files: dict[int, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob("rank*.log"):  # of an earlier, larger job
                number = path.stem.removeprefix("rank")
                if number.isdecimal() and int(number) >= size:
                    path.unlink()
            self._directory = directory
            for writer in (LAUNCHER, *range(size)):
                self._files[writer] = self._open(writer)
        except OSError as error:
            self.close()
            raise LaunchError(f"--log-dir {directory}: {error}") from error

    def write(self, writer: int, data: bytes) -> str | None:
        """Append to the file of a rank or of :data:`LAUNCHER`; close it on an error, which is returned."""
        if self._files.setdefault(writer, _NOT_YET) == _ENDED:
            return None
        view = memoryview(data)
        try:
            if self._files[writer] == _NOT_YET:
                self._files[writer] = self._open(writer)
            while view:
                view = view[os.write(self._files[writer], view) :]
        except OSError as error:
            if self._files[writer] >= 0:
                os.close(self._files[writer])
            self._files[writer] = _ENDED
            return error.strerror or str(error)
        return None

    def _open(self, writer: int) -> int:
        path = self._directory / ("launcher.log" if writer == LAUNCHER else f"rank{writer}.log")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def close(self) -> None:
        for file in self._files.values():
            if file >= 0:
                os.close(file)
        self._files.clear()
