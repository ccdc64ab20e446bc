"""Files that the processes of one user share on a host, in a directory that only this user can enter.

:class:`PrivateFile` is the venue for ranks whose launcher provides none. The file has a name only until all
ranks have met: so nothing is left behind, and when the same ranks meet again, they use a new file.

:func:`user_secret` is the secret of jobs on this host without one of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from .. import config
from ..common.process_identity import start_ticks
from ..common.trusted_file import open_trusted
from ..errors import ConfigurationError, StoreError, StoreTimeout
from ..store import FileStore
from .addresses import is_loopback, resolve

#: advice if there is no secret and none can be agreed on
SET_A_SECRET = (
    "start the processes with `shoal run`, or set the same secret for all of them: "
    "SHOAL_SECRET=$(openssl rand -hex 16)"
)

#: seconds for which another process of this user may take to write the secret
_SECRET_WRITE_TIMEOUT_S = 10.0


def user_secret() -> bytes:
    """Return the secret that all processes of this user share on this host; the first caller creates it.

    It is in ``shoal-<uid>/secret`` in the temporary directory, which only this user can read.

    Raises:
        ConfigurationError: other users have access to the directory or file, or it cannot be written.
    """
    path = private_directory() / "secret"
    try:
        with FileStore(path, timeout=_SECRET_WRITE_TIMEOUT_S) as store:
            try:
                return store.get("secret", 0.0)
            except StoreTimeout:
                return store.compare_set("secret", b"", secrets.token_hex(32).encode())
    except StoreError as error:
        raise ConfigurationError(
            f"no secret was given and none can be stored: {error}; {SET_A_SECRET}"
        ) from error


def default_secret(host: str) -> bytes:
    """Return the configured secret for a store at ``host``, or the user's secret on loopback, or b""."""
    secret = config.secret()
    if secret:
        return secret
    with contextlib.suppress(OSError):  # connecting reports an unknown host
        if is_loopback(resolve(host, 0)[0]):
            return user_secret()
    return b""


class PrivateFile:
    """The file in which the ranks of ``job`` meet on this host, opened by this rank.

    All ranks derive the same path from the job's name and the launcher's process: the nearest ancestor whose
    environment lacks the variable ``rank_variable``, which each rank has (so that wrapper scripts between
    launcher and rank do not matter). The launcher's start time makes the path unique.

    Raises:
        ConfigurationError: the directory for such files belongs to another user.
    """

    def __init__(self, job: str, rank_variable: str) -> None:
        self._directory = private_directory()
        _remove_left_over(self._directory)
        launcher = _launcher(rank_variable)
        name = f"{launcher}-{start_ticks(launcher)}-{zlib.crc32(job.encode()):08x}"
        self.path = self._directory / name
        self._file = open_trusted(self.path)

    def store(self, timeout: float) -> FileStore:
        """Return the store in the file, which works also after :meth:`unlink`."""
        return FileStore(self.path, timeout=timeout, descriptor=self._file.fileno())

    def unlink(self) -> None:
        """Remove the file's name, if it still names this file."""
        with _locked(self._directory), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                self.path.unlink()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _launcher(rank_variable: str) -> int:
    process = psutil.Process()
    for ancestor in process.parents():
        process = ancestor
        try:
            if rank_variable not in ancestor.environ():
                break
        except psutil.Error:
            break  # another user's process: the launcher's daemon
    return process.pid


def private_directory() -> Path:
    """Return the directory for files of this user, which no other user of this host can enter.

    Raises:
        ConfigurationError: it cannot be created, or belongs to another user.
    """
    try:
        directory = Path(tempfile.gettempdir()) / f"shoal-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"cannot create a directory for the shared files of this user: {error}; "
            f"set TMPDIR to a writable directory, or {SET_A_SECRET}"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{directory} must be a directory that only user {os.geteuid()} can enter; remove it, "
            "or set SHOAL_STORE to the URL of a store"
        )
    return directory


def _remove_left_over(directory: Path) -> None:
    """Remove the files of launchers that have ended: their ranks ended before all had met."""
    for path in directory.iterdir():
        named = re.fullmatch(r"([0-9]+)-([0-9]+)-[0-9a-f]{8}", path.name)
        if named is not None and start_ticks(int(named[1])) != named[2]:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
