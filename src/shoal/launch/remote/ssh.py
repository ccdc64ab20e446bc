"""Starting an agent on another host, by ssh: a process whose stdin and stdout are one socket."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Sequence

from ... import config
from ...errors import ConfigurationError, LaunchError
from .hosts import Host
from .link import Descriptors, socket_pair_end
from .said import Said

#: no terminal, no questions; a host that does not answer is given up within seconds
OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
#: runs the agents; unlike with -m, the modules of the current directory are not found, whatever their names
PROGRAM = "import sys; sys.path[0] or sys.path.pop(0); from shoal.launch.cli import main; main()"


def command(host: Host, python: str) -> list[str]:
    """What starts the agent of ``host``; nothing secret is in it.

    Raises:
        ConfigurationError: ``SHOAL_SSH`` cannot be split into words.
    """
    agent = [python, "-c", PROGRAM, "agent", "--stdio"]
    if host.is_local:
        return agent
    try:
        program = shlex.split(config.SSH.get())
    except ValueError as error:
        raise ConfigurationError(f"SHOAL_SSH={config.SSH.get()!r}: {error}") from error
    # ssh joins the words of the command, and the other host's shell splits them.
    return [*program, *OPTIONS, host.destination, "exec", *map(shlex.quote, agent)]


class Client:
    """The process that connects to a host: ssh, or for this machine the agent itself.

    Args:
        argv: the command.
        name: what messages call it.

    Attributes:
        carrier: the connection to the agent.
        stderr: what the process, or the agent, says to the user.
    """

    def __init__(self, argv: Sequence[str], name: str = "ssh") -> None:
        self.name = name
        mine, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # what Ctrl-C at the terminal means is the launcher's business
            )
        except OSError as error:
            mine.close()
            raise LaunchError(f"{argv[0]} could not be started: {error.strerror or error}") from error
        finally:
            theirs.close()
        assert self._process.stderr is not None
        self._said = Said(self._process.stderr)
        self.stderr = self._said.pipe
        self.carrier: Descriptors = socket_pair_end(mine)
        self.pid = self._process.pid

    def hear(self) -> None:
        """Read what is there of stderr."""
        self._said.hear()

    @property
    def said(self) -> list[str]:
        """The last lines of stderr."""
        return self._said.lines

    def end(self, timeout: float) -> int | None:
        """Wait for the end of the process, which has nothing to do any more; kills it then.

        Returns:
            Its exit code as a shell says it; None: it was killed here.
        """
        code: int | None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self._said.close()
        return code if code is None or code >= 0 else 128 - code
