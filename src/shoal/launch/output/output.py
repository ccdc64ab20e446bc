"""Copies the output of ranks to the launcher's stdout and stderr, and to log files."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

from ...common.lines import LineSplitter
from ...errors import LaunchError
from ..ranks.rank import JobProcess
from ..ranks.source import OutputSource
from .collapse import LineCollapser
from .line_format import LineFormat
from .sink import Sink, open_sinks

#: seconds until an unfinished line (a prompt) is shown on a terminal
_IDLE_FLUSH_S = 0.1


class _RankPipe:
    def __init__(
        self,
        source: OutputSource,
        rank: JobProcess,
        stream: _OutputStream,
        line_format: LineFormat,
        log: Callable[[bytes], None],
    ) -> None:
        self.source = source
        self.rank = rank
        self.stream = stream
        self.label = stream.label([rank])
        self._line_format = line_format
        self._log = log
        self.lines = LineSplitter()
        #: the time to show an unfinished line; infinity: there is none
        self.show_at = math.inf

    def take(self, data: bytes) -> None:
        for text, end in self.lines.feed(data):
            self._put(text, end)
        if not (self.stream.sink.terminal and self.lines.partial):
            self.show_at = math.inf
        elif self.lines.redrawing:
            self.show_at = 0.0
        elif self.show_at == math.inf:
            self.show_at = time.monotonic() + _IDLE_FLUSH_S

    def show(self) -> None:
        self.show_at = math.inf
        self.stream.put(self, self._line_format.time(), self.lines.partial, None)

    def end(self) -> None:
        for text, end in self.lines.close():
            self._put(text, end)
        self.show_at = math.inf
        self.source.close()
        self.stream.end(self)

    def _put(self, text: bytes, end: bytes) -> None:
        stamp = self._line_format.time()
        self.stream.put(self, stamp, text, end)
        self._log(stamp + text + end)


class _OutputStream:
    """stdout or stderr of all ranks: formats lines for a sink, and merges equal ones if asked to."""

    def __init__(self, sink: Sink, line_format: LineFormat, size: int) -> None:
        self.sink = sink
        self.label = partial(line_format.ranks, size=size, terminal=sink.terminal)
        self.collapser = LineCollapser(self._write) if line_format.collapse else None

    def add(self, pipe: _RankPipe) -> None:
        if self.collapser is not None:
            self.collapser.add(pipe)

    def put(self, pipe: _RankPipe, stamp: bytes, text: bytes, end: bytes | None) -> None:
        """Write or hold a line; ``end`` None: an unfinished line, for a terminal."""
        if self.collapser is None:
            self._write([pipe], stamp, text, end)
        else:
            self.collapser.put(pipe, stamp, text, end)

    def end(self, pipe: _RankPipe) -> None:
        if self.collapser is not None:
            self.collapser.end(pipe)

    def _write(self, pipes: Sequence[_RankPipe], stamp: bytes, text: bytes, end: bytes | None) -> None:
        first = pipes[0]
        prefix = stamp + (first.label if len(pipes) == 1 else self.label([pipe.rank for pipe in pipes]))
        if end is None:
            self.sink.draw(first, prefix, text)
        else:
            self.sink.line(first, prefix, text, end)


class RankOutput:
    """Reads the pipes of all ranks and writes whole, prefixed lines.

    Args:
        selector: the selector of the loop, which calls the data of ready keys.
        wake: makes the loop call :meth:`resume`; called on other threads.
        size: number of processes of the job, for the width of prefixes.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
        size: int,
        *,
        line_format: LineFormat,
        logs: Logs | None = None,
    ) -> None:
        self._selector = selector
        self._line_format = line_format
        self._logs = logs
        out, err = open_sinks(wake)
        #: the same sink twice if both are the same file
        self._sinks = {"stdout": out, "stderr": err}
        self._stdout, self._stderr = (_OutputStream(sink, line_format, size) for sink in (out, err))
        self._collapsers = [s.collapser for s in (self._stdout, self._stderr) if s.collapser is not None]
        self._pipes: list[_RankPipe] = []
        self._paused: list[_RankPipe] = []
        self._stderr_lines: dict[int, LineSplitter] = {}
        #: the sinks that cannot be written and were reported to the user
        self._troubled: list[Sink] = []
        self._closed = False

    def attach(self, rank: JobProcess) -> None:
        """Take ownership of the pipes of a rank: read them to the end, then close them."""
        if rank.restart:
            process = f" (process {rank.pid})" if rank.pid else ""  # not known yet on another host
            self.mark_log(rank.slot, f"rank {rank.name}{process}")
        for source, stream in ((rank.stdout, self._stdout), (rank.stderr, self._stderr)):
            pipe = _RankPipe(source, rank, stream, self._line_format, partial(self._log, rank.slot))
            stream.add(pipe)
            self._pipes.append(pipe)
            self._listen(pipe)
        self._stderr_lines[rank.index] = pipe.lines

    def mark_log(self, slot: int, text: str) -> None:
        """Write ``--- text ---`` into the log of a slot."""
        self._log(slot, self._line_format.time() + f"--- {text} ---\n".encode())

    def _log(self, writer: int, data: bytes) -> None:
        trouble = None if self._logs is None else self._logs.write(writer, data)
        if trouble is not None:
            name = "the launcher" if writer == LAUNCHER else f"rank {writer}"
            self.say(f"shoal: the log of {name} ends here: {trouble}".encode())

    def tail(self, rank: JobProcess) -> Sequence[bytes]:
        """The last lines of a rank's stderr, even if another process has its slot now."""
        return self._stderr_lines[rank.index].tail

    def say(self, text: bytes) -> None:
        """Write a message of the launcher, of whole lines, to stderr and its log."""
        self._release(math.inf)
        stamp = self._line_format.time()
        lines = text.splitlines()
        for line in lines:
            self._sinks["stderr"].line(self, stamp, line, b"\n")
        self._log(LAUNCHER, b"".join(stamp + line + b"\n" for line in lines))

    def next_show(self) -> float:
        """The time of the next :meth:`show`; infinity: there is none."""
        held = (collapser.next_release() for collapser in self._collapsers)
        return min((*held, *(pipe.show_at for pipe in self._pipes)), default=math.inf)

    def show(self) -> None:
        """Show the unfinished lines and release the held lines that are due."""
        now = time.monotonic()
        for pipe in self._pipes:
            if pipe.show_at <= now:
                pipe.show()
        self._release(now)

    def _release(self, until: float) -> None:
        """Write the lines that are held for ``--collapse`` to a time before this one, in order."""
        while self._collapsers:
            collapser = min(self._collapsers, key=LineCollapser.next_release)
            if collapser.next_release() >= until:
                break
            collapser.release_oldest()

    def resume(self) -> None:
        """Read again from pipes that were paused while a sink was full."""
        if not self._closed:  # afterwards the message would be lost
            for text in self.new_troubles():
                self.say(text)
        paused, self._paused = self._paused, []
        for pipe in paused:
            self._listen(pipe)

    def drain(self) -> None:
        """Read the rest of every pipe and close it, even if another process still holds its other end."""
        self.resume()
        for pipe in list(self._pipes):
            while pipe in self._pipes and self._read_once(pipe):
                pass
            if pipe in self._pipes:
                self._end(pipe)

    def close(self) -> None:
        """Accept no more lines; queued lines are still written."""
        self._closed = True
        self._release(math.inf)
        for sink in set(self._sinks.values()):
            sink.close()

    @property
    def ended(self) -> bool:
        """Whether, after :meth:`close`, all lines have been written."""
        return all(sink.writer.join(0.0) for sink in self._sinks.values())

    def new_troubles(self) -> list[bytes]:
        """Messages on files that cannot be written any more, each once."""
        found = []
        for name, sink in self._sinks.items():
            trouble = sink.writer.trouble
            if trouble and sink not in self._troubled:
                self._troubled.append(sink)
                text = f"shoal: {name} cannot be written: {trouble}; output is lost from here on"
                found.append(f"{text}, and the job goes on".encode())
        return found

    @property
    def lost(self) -> bool:
        return any(sink.writer.trouble for sink in self._sinks.values())

    def _listen(self, pipe: _RankPipe) -> None:
        pipe.source.listen(self._selector, partial(self._read, pipe))

    def _read(self, pipe: _RankPipe) -> None:
        if pipe.stream.sink.writer.full:
            pipe.source.ignore()
            self._paused.append(pipe)
        else:
            self._read_once(pipe)

    def _read_once(self, pipe: _RankPipe) -> bool:
        try:
            data = pipe.source.read()
        except BlockingIOError:
            return False
        # If the launcher's output has no reader any more, the rank gets SIGPIPE, as without a launcher.
        if not data or pipe.stream.sink.writer.broken:
            self._end(pipe)
            return False
        pipe.take(data)
        return True

    def _end(self, pipe: _RankPipe) -> None:
        pipe.source.ignore()
        self._pipes.remove(pipe)
        pipe.end()


#: the launcher, as an argument for a rank
LAUNCHER = -1


class Logs:
    """The files ``launcher.log``, ``rank0.log``, ``rank1.log`` and so on in a directory.

    Args:
        directory: created if it does not exist; raises LaunchError if it cannot be written to.
        size: number of initial ranks; files of other processes are created when they write.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        #: None: the file could not be written
        self._files: dict[int, FileIO | None] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob("rank*.log"):  # of an earlier, larger job
                number = path.stem.removeprefix("rank")
                if number.isdecimal() and int(number) >= size:
                    path.unlink()
            for writer in (LAUNCHER, *range(size)):
                self._file_of(writer)
        except OSError as error:
            self.close()
            raise LaunchError(f"--log-dir {directory}: {error}") from error

    def write(self, writer: int, data: bytes) -> str | None:
        """Append to the file of a rank or of :data:`LAUNCHER`; close it on an error, which is returned."""
        try:
            file = self._file_of(writer)
            view = memoryview(data)
            while file is not None and view:
                view = view[file.write(view) :]
        except OSError as error:
            if (failed := self._files.get(writer)) is not None:
                failed.close()
            self._files[writer] = None
            return error.strerror or str(error)
        return None

    def _file_of(self, writer: int) -> FileIO | None:
        if writer not in self._files:
            path = self._directory / ("launcher.log" if writer == LAUNCHER else f"rank{writer}.log")
            self._files[writer] = FileIO(path, "w")
        return self._files[writer]

    def close(self) -> None:
        for file in self._files.values():
            if file is not None:
                file.close()
        self._files.clear()
