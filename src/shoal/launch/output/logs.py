"""Log files of the ranks and of the launcher: ``shoal run --log-dir``."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import LaunchError

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
        """Close the files."""
        for file in self._files.values():
            if file >= 0:
                os.close(file)
        self._files.clear()
