"""One rank as a process: how it starts, takes signals and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from ..errors import LaunchError


class Rank:
    """A started rank.  It leads a session and a process group of its own, whose id is ``pid``.

    The group keeps Ctrl-C at the terminal from reaching the rank twice, and collects the rank's
    children; the session lets rank 0 read from the terminal.

    After its end the process stays unreaped (a zombie) until :meth:`reap`, so that its id, which
    is the group's too, cannot be given to a stranger.

    Attributes:
        status: None while it runs, then the exit code, or minus the number of the signal.
        seconds: how long it ran.
        stopped: the launcher ended it because another rank had failed.
        stdout, stderr: the pipes that it writes to.
    """

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        announce: Callable[[], None],
    ) -> None:
        self.index = index
        self.status: int | None = None
        self.seconds = 0.0
        self.stopped = False
        self._started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                argv,
                bufsize=0,
                stdin=None if index == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                preexec_fn=announce,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"rank {index} could not be started: {argv[0]}: {error}") from error
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout, self.stderr = self._process.stdout, self._process.stderr

    def collect(self) -> int:
        """Note the status of a rank whose ``pidfd`` has become readable, and return it."""
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else -result.si_status
        self.seconds = time.monotonic() - self._started
        return self.status

    def send(self, number: int) -> None:
        """Send a signal to the rank; none of its children gets it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def send_group(self, number: int) -> None:
        """Send a signal to the rank and to all its children that stayed in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Let go of an ended rank: its zombie, its pipes, its descriptor."""
        self._process.wait()
        self.stdout.close()
        self.stderr.close()
        os.close(self.pidfd)

    @property
    def exit_code(self) -> int:
        """The status as a shell would say it: 128 and the signal's number for a killed rank."""
        assert self.status is not None
        return self.status if self.status >= 0 else 128 - self.status


def members(groups: Sequence[int]) -> list[psutil.Process]:
    """The living processes in the given process groups."""
    wanted = set(groups)
    found = []
    for pid in psutil.pids():
        # Processes come and go while the list is read.
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) in wanted:
                process = psutil.Process(pid)
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.append(process)
    return found
