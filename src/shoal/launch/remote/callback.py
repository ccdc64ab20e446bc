"""The connection of an agent that srun has started to its launcher.

srun gives the same stdin to all tasks and mixes their output, so frames need separate connections.  They are
connections of :mod:`shoal.net`: both sides prove that they hold a secret, which the launcher creates for this
purpose and passes to srun in the environment.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from types import FrameType
from typing import Annotated, Any

import msgspec

from ... import config
from ...errors import LaunchError, UsageError, WireError
from ...net import Connection, connect

PURPOSE = "agent"
#: maximum length of the first message in bytes
MAX_FIRST_MESSAGE_BYTES = 1024
#: timeout in seconds of a connection to the launcher
_CONNECT_TIMEOUT_S = 30.0
#: seconds within which a signal of Slurm to a step and the same signal from the launcher count as one
_SAME_SIGNAL_S = 5.0
#: signals that Slurm sends to all processes of a step when a job ends or is about to end
_STEP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_WHERE = re.compile(r"(?:\[([0-9A-Fa-f:.%\w-]+)\]|([^:\[\]]*)):([0-9]{1,5})", re.ASCII)


class NodeHello(msgspec.Struct, frozen=True):
    """The first message of an agent: the node on which it runs, as Slurm calls it."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


def connect_to_launcher(where: str, environ: Mapping[str, str]) -> Connection:
    """Connect to the launcher at ``where``, and send the name of this node.

    Args:
        where: ``host:port``; ``:port`` is a port at the address from which srun was called.

    Raises:
        UsageError: this process is not a task of Slurm, or has no secret.
        LaunchError: the launcher cannot be reached.
    """
    found = _WHERE.fullmatch(where)
    if found is None or int(found[3]) > 65535:
        raise UsageError(f"--connect {where[:80]!r}: expected host:port")
    host = found[1] or found[2] or environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    node = environ.get("SLURMD_NODENAME", "")
    secret = config.secret(environ)
    if not host or not node or not secret:
        raise UsageError("shoal agent --connect is started by shoal run --srun, by srun and with a secret")
    try:
        connection = connect(
            host,
            int(found[3]),
            secret=secret,
            purpose=PURPOSE,
            timeout=_CONNECT_TIMEOUT_S,
            limit=MAX_FIRST_MESSAGE_BYTES,
        )
        connection.send(msgspec.msgpack.encode(NodeHello(node)), _CONNECT_TIMEOUT_S)
    except WireError as error:
        raise LaunchError(
            f"the agent of {node} cannot reach its launcher: {error}; set SHOAL_INTERFACE, where the "
            "launcher runs, to an address of that machine that the nodes can reach"
        ) from error
    return connection


def addresses_of(connection: Connection) -> tuple[str, str]:
    """The addresses of the launcher's host and of this host, from the connection; LaunchError: it ended."""
    sock = connection.socket
    try:
        return str(sock.getpeername()[0]), str(sock.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"the launcher has closed the connection to its agent: {error.strerror}") from error


class StepSignalFilter:
    """A context in which the agent ignores signals that Slurm sends to all processes of a step.

    The agent's ranks get these signals too, so the agent must not pass on the same signal from the launcher.
    """

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StepSignalFilter:
        # Not SIG_IGN, which the ranks would inherit.
        self._former = {number: signal.signal(number, self._on_signal) for number in _STEP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def __call__(self, number: int) -> bool:
        """Whether Slurm has just sent signal ``number`` to all processes of the step."""
        return time.monotonic() < self._at.get(number, -_SAME_SIGNAL_S) + _SAME_SIGNAL_S

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._at[number] = time.monotonic()


def remove_variables(names: tuple[str, ...]) -> None:
    """Remove the secret and ``names`` from the environment of this process, and thus of its ranks."""
    for name in (config.SECRET.name, *names):
        os.environ.pop(name, None)
