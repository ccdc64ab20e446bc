"""Opening a file that only this process's user can read and write.

The file holds the secret of a job, so a file that another user may have prepared is refused: a symbolic link,
a file of another user, a file that others may read, a file with several hard links, a FIFO or a device.  All
checks use the open descriptor, never the path, so the file cannot be exchanged in between.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from ..errors import ConfigurationError, StoreError
from .copy_refusal import refuses_copies

_MODE = 0o600
_MAX_ATTEMPTS = 100

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@refuses_copies("a Descriptor", "an open file", "Open the file again")
class TrustedFile:
    """An open file.  It is closed when this object is deleted, so Ctrl-C does not leak a descriptor."""

    #: for an object whose construction was interrupted
    _held: list[int] = []  # noqa: RUF012

    def __init__(self, path: str | Path, flags: int, mode: int = 0o777) -> None:
        self._held = []
        # A single C call opens the file and stores the descriptor, so Ctrl-C cannot come in between.
        self._held.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))

    def fileno(self) -> int:
        """Return the descriptor, -1 when closed."""
        return self._held[0] if self._held else -1

    def read_at(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes, or as many as there are."""
        parts = []
        while count and (part := os.pread(self.fileno(), count, offset)):
            parts.append(part)
            count -= len(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write_at(self, offset: int, data: bytes) -> int:
        """Write all of ``data``; return the offset of its end."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fileno(), view, offset)
            view = view[written:]
            offset += written
        return offset

    def close(self) -> None:
        """Close the file; may be called twice."""
        while self._held:
            os.close(self._held.pop())

    __del__ = close


def open_trusted(path: Path) -> TrustedFile:
    """Open ``path`` for reading and writing; if it does not exist, create it with mode 600 despite any umask.

    This neither blocks nor writes.  Parent directories are not checked: a user who can write to one of them
    can remove or replace the file, but the new file is checked too.

    Returns:
        The open file, close-on-exec.

    Raises:
        ConfigurationError: other users may access the file; the message has the reason and the remedy.
        StoreError: it cannot be opened.
    """
    try:
        # Another process of the job may create or remove the file concurrently.
        for _ in range(_MAX_ATTEMPTS):
            try:
                return _make(path)
            except FileExistsError:
                pass
            try:
                found = TrustedFile(path, os.O_PATH | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                return reopen_trusted(found.fileno(), path)
            finally:
                found.close()
    except OSError as error:
        raise StoreError(f"cannot open file store {path}: {error.strerror}") from error
    raise StoreError(f"cannot open file store {path}: it is created and removed repeatedly")


def reopen_trusted(descriptor: int, path: Path) -> TrustedFile:
    """Open the file of ``descriptor`` again, with independent locks, even if it was renamed or removed.

    Args:
        descriptor: of the file; not closed.  ``O_PATH`` suffices, which does not affect FIFOs and devices.
        path: name of the file for messages.

    Raises:
        ConfigurationError, StoreError: see :func:`open_trusted`.
    """
    refuse_untrusted(descriptor, path)
    try:
        return TrustedFile(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        raise StoreError(f"cannot open file store {path}: {error.strerror}") from error


def refuse_untrusted(descriptor: int, path: Path) -> None:
    """Raise ConfigurationError unless the open file is a regular file that only this user can access."""
    found = os.fstat(descriptor)
    user = os.geteuid()
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFLNK:
        _refuse(path, "it is a symbolic link", "give the path of its target, if you trust its creator")
    if kind != stat.S_IFREG:
        _refuse(path, f"it is {_KINDS.get(kind, 'no file')}", "give the path of a file, or of none yet")
    if found.st_uid != user:
        _refuse(
            path,
            f"it belongs to {_name(found.st_uid)} and this process runs as {_name(user)}: its owner could "
            "read the job's secret in it, and change the messages between ranks",
            "remove it, or give a path in a directory of your own",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        _refuse(
            path,
            f"its mode is {stat.S_IMODE(found.st_mode):o}: others could read the job's secret in it",
            "remove it, and it will be created with mode 600 (on a file system that stores modes)",
        )
    if found.st_nlink > 1:
        _refuse(
            path,
            f"the file has {found.st_nlink} hard links, so it has another purpose",
            "give the path of a new file, or of one with a single name",
        )


def _make(path: Path) -> TrustedFile:
    """Create the file, which must not exist; ``O_EXCL`` does not follow symbolic links either."""
    made = TrustedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        if stat.S_IMODE(os.fstat(made.fileno()).st_mode) != _MODE:  # the umask removed more bits
            os.fchmod(made.fileno(), _MODE)
        refuse_untrusted(made.fileno(), path)
    except BaseException:
        made.close()
        raise
    return made


def _refuse(path: Path, why: str, remedy: str) -> None:
    raise ConfigurationError(f"refusing the file store {path}: {why}; {remedy}")


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return f"user {user}"
