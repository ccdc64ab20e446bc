"""A file for each rank, with what it writes: ``shoal run --log-dir``."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import LaunchError


class Logs:
    """The files ``rank0.log``, ``rank1.log`` and so on in a directory.

    Args:
        directory: is made if it is not there.
        size: number of ranks.

    Raises:
        LaunchError: it cannot be made or written to.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._files: list[int] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob("rank*.log"):  # of an earlier, larger job
                number = path.stem.removeprefix("rank")
                if number.isdecimal() and int(number) >= size:
                    path.unlink()
            for rank in range(size):
                path = directory / f"rank{rank}.log"
                self._files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        except OSError as error:
            self.close()
            raise LaunchError(f"--log-dir {directory}: {error}") from error

    def write(self, rank: int, data: bytes) -> str | None:
        """Append to a rank's file; the reason in words if that failed, which ends the file."""
        if self._files[rank] < 0:
            return None
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._files[rank], view) :]
        except OSError as error:
            os.close(self._files[rank])
            self._files[rank] = -1
            return f"the log of rank {rank} ends here: {error.strerror or error}"
        return None

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            if file >= 0:
                os.close(file)
        self._files.clear()
