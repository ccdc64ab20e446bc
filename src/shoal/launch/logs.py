"""A file for each rank, and one for the launcher, with what they write: ``shoal run --log-dir``."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import LaunchError

#: stands for the launcher where a rank is expected
LAUNCHER = -1


class Logs:
    """The files ``launcher.log``, ``rank0.log``, ``rank1.log`` and so on in a directory.

    Args:
        directory: is made if it is not there.
        size: number of ranks.

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
            for writer in (LAUNCHER, *range(size)):
                path = directory / ("launcher.log" if writer == LAUNCHER else f"rank{writer}.log")
                self._files[writer] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            self.close()
            raise LaunchError(f"--log-dir {directory}: {error}") from error

    def write(self, writer: int, data: bytes) -> str | None:
        """Append to the file of a rank, or of :data:`LAUNCHER`; if that fails the file ends: the reason."""
        if self._files[writer] < 0:
            return None
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._files[writer], view) :]
        except OSError as error:
            os.close(self._files[writer])
            self._files[writer] = -1
            return error.strerror or str(error)
        return None

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            if file >= 0:
                os.close(file)
        self._files.clear()
