"""A file for each rank, and one for the launcher, with what they write: ``shoal run --log-dir``."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import LaunchError

#: stands for the launcher where a rank is expected
LAUNCHER = -1

#: stand for descriptors
_ENDED, _NOT_YET = -1, -2


class Logs:
    """The files ``launcher.log``, ``rank0.log``, ``rank1.log`` and so on in a directory.

    Args:
        directory: is made if it is not there.
        size: number of ranks that meet first; others have a file once they write.

    Raises:
        LaunchError: it cannot be made or written to.
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
        """Append to the file of a rank, or of :data:`LAUNCHER`; if that fails the file ends: the reason."""
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
        """Close the files."""
        for file in self._files.values():
            if file >= 0:
                os.close(file)
        self._files.clear()
