"""The environment variables that the launcher sets for each rank."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

#: the variables that say of a process that it is one of the ranks that meet first
OF_RANKS = ("SHOAL_RANK", "SHOAL_SIZE", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Job:
    """One start of ``shoal run``: the values that all its ranks share.

    Attributes:
        size: number of ranks.
        spares: how many processes beyond them wait to take the place of one that dies.
        ident: the job id that fences its keys in the store.
        secret: authenticates every connection of the job; never on a command line.  "": the ranks find
            theirs in the environment that they inherit.
        epoch: how often the job was started before.
    """

    size: int
    spares: int = 0
    ident: str = field(default_factory=lambda: secrets.token_hex(6))
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    epoch: int = 0

    def variables(
        self,
        rank: int,
        store: str,
        master_port: str,
        *,
        master: str = "127.0.0.1",
        local: tuple[int, int] | None = None,
    ) -> dict[str, str]:
        """The variables of ``rank``.

        Args:
            rank: whose variables.
            store: URL of the job's store.
            master_port: where rank 0 is to listen if the program uses ``torch.distributed``.
            master: address of rank 0's host.
            local: its number on its host, and how many are there; None: there is one host.

        The second half has the names of torchrun: ``torch.distributed`` and the libraries above it read
        them, whatever the backend.
        """
        here, count = (rank, self.size) if local is None else local
        return {
            "SHOAL_STORE": store,
            "SHOAL_RANK": str(rank),
            "SHOAL_SIZE": str(self.size),
            "SHOAL_LOCAL_RANK": str(here),
            "SHOAL_LOCAL_SIZE": str(count),
            "SHOAL_JOB": self.ident,
            "SHOAL_EPOCH": str(self.epoch),
            **({"SHOAL_SESSION_SIZE": str(self.size)} if self.spares else {}),
            **({"SHOAL_SECRET": self.secret} if self.secret else {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(here),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": master,
            "MASTER_PORT": master_port,
        }

    def newcomer(
        self, slot: int, store: str, master_port: str, *, local: tuple[int, int], master: str = "127.0.0.1"
    ) -> dict[str, str]:
        """The variables of a process that joins the ranks later: it has no rank yet.

        Those in :data:`OF_RANKS` must not be in its environment.  ``local`` is its slot among those of its
        host, and how many these are.
        """
        variables = self.variables(slot, store, master_port, master=master, local=local)
        return {k: v for k, v in variables.items() if k not in OF_RANKS} | {"SHOAL_JOIN": "1"}


class ReservedPort:
    """A free port of this machine, for a process that the launcher starts to listen on.

    The socket is bound and never listens.  With ``SO_REUSEADDR`` on both sides another one may bind the
    same port by its number and listen there, while the kernel gives it to nobody who asks for any port.

    Args:
        address: on which it is kept; "" for all.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def defaults(
    size: int, inherited: Mapping[str, str], terminal: os.terminal_size | None, *, prefixed: bool = True
) -> dict[str, str]:
    """Variables that the launcher sets unless the user did.

    Args:
        size: number of ranks.
        inherited: the launcher's own environment.
        terminal: size of the terminal that shows the output, None when there is none.
        prefixed: whether lines begin with their rank.

    ``OMP_NUM_THREADS`` shares the cores between the ranks: each would otherwise start a thread per
    core.  ``PYTHONUNBUFFERED`` makes lines appear when they are written.  The ranks write to pipes:
    if those lead to a terminal, variables tell them its width and that it shows colours.
    """
    cores = len(os.sched_getaffinity(0))
    values = {"OMP_NUM_THREADS": str(max(1, cores // size)), "PYTHONUNBUFFERED": "1"}
    if terminal is not None:
        values["COLUMNS"] = str(max(20, terminal.columns - (len(prefix("0", size)) if prefixed else 0)))
        values["LINES"] = str(terminal.lines)
        if "NO_COLOR" not in inherited:
            values["FORCE_COLOR"] = "1"
    return {name: value for name, value in values.items() if name not in inherited}


def prefix(name: str, size: int) -> str:
    """The beginning of each line of a rank: ``[3] ``, equally wide for every rank that meets first."""
    width = len(str(size - 1))
    return f"[{name:>{width}}] "
