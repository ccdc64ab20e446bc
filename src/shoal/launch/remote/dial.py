"""How an agent that Slurm has started reaches its launcher: it connects to a port there.

srun gives its own stdin to all tasks and mixes what they write, so the frames need connections of their own.
They are connections of :mod:`shoal.net`: both sides prove that they hold a secret, which the launcher makes
for this purpose and gives to srun in the environment.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Annotated, Any

import msgspec

from ... import config
from ...errors import LaunchError, UsageError, WireError
from ...net import Connection, connect

PURPOSE = "agent"
#: the longest first message
FIRST_MESSAGE = 1024
#: seconds for a connection to the launcher
_PATIENCE = 30.0
#: seconds in which a signal to all processes of a step, and the launcher's order to send it, are one
_SAME = 5.0
#: what Slurm sends to all processes of a step when a job ends or is about to
_TO_ALL = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_WHERE = re.compile(r"(?:\[([0-9A-Fa-f:.%\w-]+)\]|([^:\[\]]*)):([0-9]{1,5})", re.ASCII)


class NodeHello(msgspec.Struct, frozen=True):
    """The first message of an agent: the node on which it runs, as Slurm calls it."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


def dial(where: str, environ: Mapping[str, str]) -> Connection:
    """Connect to the launcher at ``where``, and say which node this is.

    Args:
        where: ``host:port``; ``:port`` means the address from which srun was called, as Slurm knows it.

    Raises:
        UsageError: this is no task of Slurm, or it has no secret.
        LaunchError: the launcher cannot be reached.
    """
    found = _WHERE.fullmatch(where)
    if found is None or int(found[3]) > 65535:
        raise UsageError(f"--connect {where[:80]!r}: expected host:port")
    host = found[1] or found[2] or environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    node = environ.get("SLURMD_NODENAME", "")
    secret = config.secret(environ)
    if not host or not node or not secret:
        raise UsageError("shoal run --srun starts agents by itself, with srun and a secret")
    try:
        connection = connect(
            host, int(found[3]), secret=secret, purpose=PURPOSE, timeout=_PATIENCE, limit=FIRST_MESSAGE
        )
        connection.send(msgspec.msgpack.encode(NodeHello(node)), _PATIENCE)
    except WireError as error:
        raise LaunchError(
            f"the agent of {node} cannot reach its launcher: {error}; the launcher listens on all addresses "
            "of its machine, or on that in SHOAL_INTERFACE: name one there that the nodes reach"
        ) from error
    return connection


def ends_of(connection: Connection) -> tuple[str, str]:
    """The addresses of the launcher's host and of this one, as the connection knows them.

    Raises:
        LaunchError: the launcher has ended the connection.
    """
    sock = connection.socket
    try:
        return str(sock.getpeername()[0]), str(sock.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"the launcher has ended the connection to its agent: {error.strerror}") from error


class IgnoredStepSignal:
    """A context in which a signal that Slurm sends to all processes of a step does nothing to the agent.

    The agent's ranks have got it too, so what the launcher tells them by the same signal is nothing new.
    """

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._former: dict[int, Any] = {}

    def __enter__(self) -> IgnoredStepSignal:
        # A handler and not SIG_IGN, which the ranks would inherit.
        self._former = {number: signal.signal(number, self._heard) for number in _TO_ALL}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def __call__(self, number: int) -> bool:
        """Whether all processes of the step were sent signal ``number`` just now."""
        return time.monotonic() < self._at.get(number, -_SAME) + _SAME

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._at[number] = time.monotonic()


def forget(names: tuple[str, ...]) -> None:
    """Remove variables from this process's environment, and so from those of ranks."""
    for name in (config.SECRET.name, *names):
        with suppress(KeyError):
            del os.environ[name]
