"""Starts an agent on another host by ssh: a process with one socket for stdin and stdout."""

from __future__ import annotations

import selectors
import shlex
import socket
import subprocess
from collections.abc import Sequence

from ... import config
from ...errors import ConfigurationError, LaunchError
from ..output.causes import shell_code
from ..ranks.source import StderrTail
from .connection import DescriptorCarrier
from .hosts import Host

#: no terminal, no prompts, and a timeout of seconds for a host that does not answer
OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
#: Python code that runs an agent; unlike ``-m``, it does not import modules from the current directory
PROGRAM = "import sys; sys.path[0] or sys.path.pop(0); from shoal.launch.cli import main; main()"


def command(host: Host, python: str) -> list[str]:
    """The command that starts the agent of ``host``; raises ConfigurationError if SHOAL_SSH is malformed.

    It has no secrets, because other users can see it.
    """
    agent = [python, "-c", PROGRAM, "agent", "--stdio"]
    if host.is_local:
        return agent
    try:
        program = shlex.split(config.SSH.get())
    except ValueError as error:
        raise ConfigurationError(f"SHOAL_SSH={config.SSH.get()!r}: {error}") from error
    # ssh joins the words of the command, and the shell of the other host splits them.
    return [*program, *OPTIONS, host.destination, "exec", *map(shlex.quote, agent)]


class SshProcess:
    """The process that connects to a host: ssh, or the agent itself on this machine."""

    def __init__(self, argv: Sequence[str], name: str = "ssh") -> None:
        self.name = name
        mine, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # only the launcher must get Ctrl-C at the terminal
            )
        except OSError as error:
            mine.close()
            raise LaunchError(f"{argv[0]} could not be started: {error.strerror or error}") from error
        finally:
            theirs.close()
        assert self._process.stderr is not None
        self._stderr_tail = StderrTail(self._process.stderr)
        fd = mine.detach()
        self.carrier = DescriptorCarrier(fd, fd)

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        """Read stderr in the loop of ``selector``; None: in no loop."""
        self._stderr_tail.watch(selector)

    @property
    def stderr_tail(self) -> list[str]:
        return self._stderr_tail.lines

    def end(self, timeout: float) -> int | None:
        """Wait for the process to exit; return its exit code as a shell gives it.

        After ``timeout`` seconds kill it, and return None.
        """
        code = None
        try:
            code = shell_code(self._process.wait(timeout))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr_tail.close()
        return code
