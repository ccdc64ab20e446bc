"""Atomic creation and replacement of files.

The content is written to a temporary file in the directory of the target, which is then renamed.

- The name of the temporary file is random, and the file is created with ``O_EXCL | O_NOFOLLOW``: two writers
  of one target never share a temporary file, and a link placed there is not followed.
- The writer holds a lock (``flock``) on its temporary file.  The next writer in the directory deletes
  unlocked temporary files, whose writers were killed.  Nothing is deleted if the file system has no locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.shoal-part", re.DOTALL)
#: maximum bytes of the target's name in the name of the temporary file: file systems allow 255 in total
_NAME_BYTES = 200
#: attempts to create a temporary file: another writer may delete one that is not locked yet
_ATTEMPTS = 100


class AtomicFile:
    """A temporary file that can replace ``target``; deleted at the end of the ``with`` block otherwise.

        with AtomicFile("state.pt") as draft:
            draft.file.write(data)
            draft.replace(durable=True)

    Args:
        target: path of the file to create or replace.  A symbolic link is replaced, not followed.
        mode: permissions of the new file, before the umask.

    Attributes:
        file: the temporary file, open for binary writing.

    Raises:
        OSError: the temporary file cannot be created or written, or ``target`` is a directory, a device such
            as /dev/null, a pipe or a socket, which must not be replaced; the error names ``target``.
    """

    file: BinaryIO

    def __init__(self, target: str | os.PathLike[str], *, mode: int = 0o666) -> None:
        self._target = Path(target)
        self._temporary: Path | None = None
        _delete_left_overs(self._target.parent)
        try:
            _check_replaceable(self._target)
            descriptor, self._temporary = _create(self._target, mode)
        except OSError as error:
            error.filename = str(self._target)
            raise
        self.file = open(descriptor, "wb")  # noqa: SIM115 - close() does it

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.filename is None and self._temporary is not None:
            error.filename = str(self._target)
        self.close()

    def replace(self, *, durable: bool = False) -> None:
        """Rename the temporary file to the target.

        Args:
            durable: flush the file to the disk before, and its directory after.

        Raises:
            OSError: it could not be written or renamed, and the target is unchanged; or the directory could
                not be flushed, and the target is replaced, but may revert if the machine crashes.
        """
        assert self._temporary is not None
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
        os.replace(self._temporary, self._target)
        self._temporary = None
        self.close()
        if durable:
            folder = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Delete the temporary file unless it has replaced the target; may be called twice."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            self._temporary = None
        with contextlib.suppress(OSError):  # flushing a deleted file may fail
            self.file.close()


def _check_replaceable(target: Path) -> None:
    """Raise OSError if ``target`` exists and is neither a regular file nor a symbolic link."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise FileExistsError(errno.EEXIST, "it is not a regular file")


def _create(target: Path, mode: int) -> tuple[int, Path]:
    """Create and lock a temporary file for ``target``; return its descriptor and path."""
    name = os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_ATTEMPTS):
        path = target.with_name(f".{name}.{secrets.token_hex(8)}.shoal-part")
        descriptor = os.open(path, flags, mode)
        try:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)  # another writer deleted it before it was locked
    raise FileExistsError(0, "temporary files are deleted as fast as they are created")


def _delete_left_overs(folder: Path) -> None:
    """Delete the temporary files in ``folder`` whose writers were killed."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.path for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    except OSError:
        return  # creating the temporary file will raise
    for path in found:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)  # names are never reused, so this is the locked file or already deleted
            finally:
                os.close(descriptor)
