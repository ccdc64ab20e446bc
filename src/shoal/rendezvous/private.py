"""A meeting point for ranks on one host whose launcher offers none: a file that only its user can read.

The file has a name only until all ranks have met in it.  So nothing is left behind whatever happens to
them later, and when the same ranks meet again, they do so in a new file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..errors import ConfigurationError
from ..store import FileStore
from ..store.trusted import open_trusted


class PrivateFile:
    """This rank's hold on the file in which the ranks of ``job`` meet on this host.

    All ranks derive the same path: from the job's name and from the launcher's process, the nearest
    ancestor whose environment lacks the variable ``marker`` that each rank has (so that wrapper
    scripts between launcher and rank do not matter).  The launcher's start time makes it unique.

    Raises:
        ConfigurationError: the directory for such files belongs to somebody else.
    """

    def __init__(self, job: str, marker: str) -> None:
        self._directory = _private_directory()
        _sweep(self._directory)
        launcher = _launcher(marker)
        name = f"{launcher.pid}-{_start(launcher)}-{zlib.crc32(job.encode()):08x}"
        self.path = self._directory / name
        self._fd = open_trusted(self.path)

    def store(self, timeout: float) -> FileStore:
        """The store in the file, which works also when the file has no name any more."""
        return FileStore(self.path, timeout=timeout, descriptor=self._fd)

    def unlink(self) -> None:
        """Take the file's name away, if it still has it."""
        with _locked(self._directory), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._fd)):
                self.path.unlink()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def _launcher(marker: str) -> psutil.Process:
    process = psutil.Process()
    for ancestor in process.parents():
        process = ancestor
        try:
            if marker not in ancestor.environ():
                break
        except psutil.Error:
            break  # another user's process: the launcher's daemon
    return process


def _start(process: psutil.Process) -> int:
    return int(process.create_time() * 1000)


def _private_directory() -> Path:
    directory = Path(tempfile.gettempdir()) / f"shoal-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{directory} must be a directory that only user {os.geteuid()} can enter; remove it, "
            "or set SHOAL_STORE to another meeting point"
        )
    return directory


def _sweep(directory: Path) -> None:
    """Remove the files of launchers that are gone: their ranks ended before all had met."""
    for path in directory.iterdir():
        pid, start, _ = path.name.split("-")
        try:
            alive = _start(psutil.Process(int(pid))) == int(start)
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
