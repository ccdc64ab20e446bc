"""Opening a file that nobody but this process's user can read, write, or put in place of another.

The file holds the secret of a job, so a file that somebody else prepared is refused: a symbolic link, a file
of another user, a file that others may read, a second name of some other file, a FIFO or a device.  Every
check looks at the file that is already open, never at its path, so nobody can exchange it in between.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from ..errors import ConfigurationError, StoreError
from .copy_refusal import refuses_copies

_MODE = 0o600
_TRIES = 100

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@refuses_copies(
    "a Descriptor",
    "an open file",
    "Open the file again",
)
class OpenedFile:
    """An open file.  It is closed with this object, if not before, so Ctrl-C leaves none behind."""

    #: of an object whose making was interrupted
    _held: list[int] = []  # noqa: RUF012

    def __init__(self, path: str | Path, flags: int, mode: int = 0o777) -> None:
        self._held = []
        # One call of C opens the file and keeps it: a Ctrl-C comes before or after.
        self._held.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))

    def fileno(self) -> int:
        """Its number, -1 when closed."""
        return self._held[0] if self._held else -1

    def close(self) -> None:
        """Close the file; it may be called twice."""
        while self._held:
            os.close(self._held.pop())

    __del__ = close


def open_trusted(path: Path) -> OpenedFile:
    """Open ``path`` for reading and writing; made with mode 600, whatever the umask, if it does not exist.

    Nothing is waited for and nothing is written.  The directories above are taken as they are: whoever can
    write to one of them can remove the file or put another in its place, but that one is refused in turn.

    Returns:
        The open file, close-on-exec.

    Raises:
        ConfigurationError: the file is not this user's alone; the message says why and what to do.
        StoreError: it cannot be opened at all.
    """
    try:
        # Another process of ours may make the file, or remove it, at the same moment.
        for _ in range(_TRIES):
            try:
                return _make(path)
            except FileExistsError:
                pass
            try:
                found = OpenedFile(path, os.O_PATH | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                return reopen_trusted(found.fileno(), path)
            finally:
                found.close()
    except OSError as error:
        raise StoreError(f"cannot open file store {path}: {error.strerror}") from error
    raise StoreError(f"cannot open file store {path}: it is made and removed again and again")


def reopen_trusted(descriptor: int, path: Path) -> OpenedFile:
    """Open the file behind ``descriptor`` anew (with locks of its own), though its name may be gone.

    Args:
        descriptor: of the file; it stays open.  ``O_PATH`` is enough, which does nothing to a FIFO or device.
        path: how to name the file in messages.

    Raises:
        ConfigurationError, StoreError: as of :func:`open_trusted`.
    """
    refuse_untrusted(descriptor, path)
    try:
        return OpenedFile(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        raise StoreError(f"cannot open file store {path}: {error.strerror}") from error


def refuse_untrusted(descriptor: int, path: Path) -> None:
    """Raise ConfigurationError unless the open file is a regular one of this user's alone."""
    found = os.fstat(descriptor)
    user = os.geteuid()
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFLNK:
        _refuse(path, "it is a symbolic link", "give the path that it leads to, if you trust who made it")
    if kind != stat.S_IFREG:
        _refuse(path, f"it is {_KINDS.get(kind, 'no file')}", "give the path of a file, or of none yet")
    if found.st_uid != user:
        _refuse(
            path,
            f"it belongs to {_name(found.st_uid)} and this process runs as {_name(user)}: its owner could "
            "read the job's secret in it, and change what the ranks tell each other",
            "remove it, or give a path in a directory of your own",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        _refuse(
            path,
            f"its mode is {stat.S_IMODE(found.st_mode):o}: others could read the job's secret in it",
            "remove it, and it is made anew with mode 600 (on a file system that keeps modes)",
        )
    if found.st_nlink > 1:
        _refuse(
            path,
            f"the file has {found.st_nlink} names (hard links), so it was made for something else",
            "give the path of a file of its own, or of none yet",
        )


def _make(path: Path) -> OpenedFile:
    """Make the file, which must not exist: ``O_EXCL`` follows no symbolic link either."""
    made = OpenedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        if stat.S_IMODE(os.fstat(made.fileno()).st_mode) != _MODE:  # the umask took even more
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
