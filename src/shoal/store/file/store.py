"""A store in a file, for processes that share nothing but a disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ...common.decoding import MalformedMessage
from ...common.trusted_file import open_trusted, reopen_trusted
from ...common.wording import in_seconds
from ...errors import StoreError, StoreTimeout
from ...net import Deadline
from ..backing import RequestExecutor
from ..base import Store
from ..operations import KeyTable
from ..requests import StoreRequest, decode, encode
from .log import LogFile

T = TypeVar("T")

#: seconds beyond its deadline for which a call waits for other threads
_REPLY_MARGIN_S = 2.0


class FileStore(Store):
    """A store in a log file: every process appends its changes, and replays the file into its own memory.

    A request that changes something holds the file's lock while it reads new records, applies itself and
    appends itself; a request that only reads takes no lock. A process may be killed at any moment:
    acknowledged changes remain, the next writer truncates an unfinished record (see ``log.py``), and the
    kernel releases the lock.

    The store never removes the file: only the user knows when the last process has finished.
    The file may contain a job's secret. A file that another user made or could read is refused
    (see ``common/trusted_file.py``).

    Args:
        path: the file; created with mode 600 if it does not exist.
        timeout: default deadline in seconds; None: ``SHOAL_TIMEOUT``.
        descriptor: of the file, if it is already open: it stays open, and the path is used in messages only.

    Raises:
        ConfigurationError: the file is a link, or another user owns it or has access to it.
        StoreError: the file cannot be opened.
    """

    _backing: _File

    def __init__(
        self, path: str | Path, *, timeout: float | None = None, descriptor: int | None = None
    ) -> None:
        super().__init__(_File(Path(path).absolute(), descriptor), timeout)

    @property
    def path(self) -> Path:
        """The file."""
        return self._backing.path


class _File(RequestExecutor):
    """The log, and a table of all records read so far."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        super().__init__()
        self.path = path
        opened = open_trusted(path) if descriptor is None else reopen_trusted(descriptor, path)
        self._log = LogFile(path, opened)
        self._table = KeyTable()
        self._mutex = threading.Lock()  # the file's lock does not exclude threads of one process

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        with self._exclusive(deadline):
            if request.writes:
                with self._log.locked(deadline):
                    return self._write(request)
            self._replay(locked=False)
            return request.apply(self._table)

    def clone(self, timeout: float) -> _File:
        """Open the same file again, even if its path now names another one."""
        with self._exclusive(Deadline(timeout)):
            return _File(self.path, self._log.fileno())

    def close(self) -> None:
        """Close the file, after a request in progress has completed."""
        with self._mutex:
            self._log.close()

    def _write(self, request: StoreRequest[T]) -> T:
        self._replay(locked=True)
        try:
            result = request.apply(self._table)
            if self._table.touched:
                self._log.append(encode(request))
        except BaseException:
            # The table may hold a change that the log does not: read the log again.
            self._table = KeyTable()
            self._log.rewind()
            raise
        self._table.touched.clear()
        return result

    def _replay(self, *, locked: bool) -> None:
        try:
            for payload in self._log.read(locked=locked):
                decode(payload).apply(self._table)
        except MalformedMessage as error:
            # Each call must fail at this record: read the log again.
            self._table = KeyTable()
            self._log.rewind()
            raise StoreError(f"file store {self.path} holds a record of another version: {error}") from error
        self._table.touched.clear()

    @contextlib.contextmanager
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        """Exclude the other threads of this process."""
        # The holder may be waiting for another process, so even a call without time left waits for a while.
        if not self._mutex.acquire(timeout=deadline.remaining() + _REPLY_MARGIN_S):
            raise StoreTimeout(
                f"file store {self.path} was busy in another thread for {in_seconds(deadline.timeout)}"
            )
        try:
            if self.closed.is_set():
                raise StoreError("closed")  # Store replaces the message
            yield
        finally:
            self._mutex.release()

    def __str__(self) -> str:
        return f"FileStore on {self.path}"
