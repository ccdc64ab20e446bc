"""The helper process of a C++ program, started by the launcher (``shoal run --connect``).

Usually a C++ program starts its helper (:mod:`shoal.backend.native.helper`) itself.  Where it cannot, because
it sees no Python or must not start processes, the launcher does it, and the program inherits the socket.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

#: seconds for the helper to end after the rank has ended, which closes its socket
_END_TIMEOUT_S = 2.0
_PROGRAM = (
    "import sys; '' in sys.path and sys.path.remove(''); from shoal.backend.native.helper import main; main()"
)


class RankHelper:
    """A helper for a rank that is started next, with its environment and the descriptors named there.

    The rank must inherit the descriptor ``inherited``.  Raises OSError if the helper cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], inherits: Iterable[int]) -> None:
        self._theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inherited = self._theirs.fileno()
        with mine:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(mine.fileno())],
                    stdin=subprocess.DEVNULL, env=environment, pass_fds=[mine.fileno(), *inherits],
                    start_new_session=True,
                )  # fmt: skip
            except BaseException:
                self._theirs.close()
                raise

    def started(self) -> None:
        """Close the rank's end here, after the rank has inherited it."""
        self._theirs.close()

    def close(self) -> None:
        """End and reap the helper; the rank has ended, or was not started."""
        self._theirs.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
            return
        self._process.kill()
        self._process.wait()
