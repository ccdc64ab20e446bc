"""The environment of each rank: its variables, and its cores for ``--bind``."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

#: variables that only the initial ranks have
INITIAL_RANK_VARIABLES = ("SHOAL_RANK", "SHOAL_SIZE", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Job:
    """The values that all ranks of one start of ``shoal run`` share.

    Attributes:
        size: number of ranks.
        spares: number of spare processes.
        ident: the job id, which fences its keys in the store.
        secret: authenticates every connection of the job; never on a command line.  "": the ranks inherit a
            secret in their environment.
        epoch: number of earlier starts of the job.
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
        newcomer: bool = False,
    ) -> dict[str, str]:
        """The variables of ``rank``.

        Args:
            store: URL of the job's store.
            master_port: port for rank 0 to listen on if the program uses ``torch.distributed``.
            master: address of rank 0's host.
            local: its number on its host, and the number of ranks there; None: there is one host.
            newcomer: it is the slot of a process that joins the ranks later and has no rank yet, so the
                variables in :data:`INITIAL_RANK_VARIABLES` must not be in its environment.

        The second half are variables of torchrun, which ``torch.distributed`` and libraries based on it read
        for any backend.
        """
        here, count = (rank, self.size) if local is None else local
        found = {
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
        if not newcomer:
            return found
        return {k: v for k, v in found.items() if k not in INITIAL_RANK_VARIABLES} | {"SHOAL_JOIN": "1"}


class ReservedPort:
    """A free port at ``address`` ("": all), reserved for a process that the launcher starts.

    The socket is bound and never listens.  With ``SO_REUSEADDR`` on both sides another socket may bind the
    same port by its number and listen there, while the kernel does not choose it for a bind to port 0.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def default_variables(
    size: int, inherited: Mapping[str, str], terminal: os.terminal_size | None, *, prefix_width: int = 0
) -> dict[str, str]:
    """Variables that the launcher sets unless the user has set them.

    Args:
        inherited: the launcher's environment.
        terminal: size of the terminal that shows the output; None: there is no terminal.
        prefix_width: number of columns that the launcher's prefixes of lines take.

    ``OMP_NUM_THREADS`` divides the cores by the ranks; otherwise each rank would start a thread per core.
    ``PYTHONUNBUFFERED`` makes lines appear when they are written.  Ranks write to pipes, so variables tell
    them the size of the terminal and that it has colours.
    """
    cores = len(os.sched_getaffinity(0))
    values = {"OMP_NUM_THREADS": str(max(1, cores // size)), "PYTHONUNBUFFERED": "1"}
    if terminal is not None:
        values["COLUMNS"] = str(max(20, terminal.columns - prefix_width))
        values["LINES"] = str(terminal.lines)
        if "NO_COLOR" not in inherited:
            values["FORCE_COLOR"] = "1"
    return {name: value for name, value in values.items() if name not in inherited}


_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def usable_cores() -> list[int]:
    """The cores that this process may use, ordered by socket and physical core."""
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place(core), core))


def divide_cores(cores: Sequence[int], size: int) -> list[list[int]]:
    """Divide ``cores`` by ``size`` ranks, into parts with sizes that differ by at most one.

    If there are fewer cores than ranks, each rank gets one core, shared with other ranks.
    """
    count = len(cores)
    if count < size:
        return [[cores[rank % count]] for rank in range(size)]
    return [list(cores[rank * count // size : (rank + 1) * count // size]) for rank in range(size)]


def _place(core: int) -> tuple[int, int]:
    """Socket and physical core; (0, ``core``) if the kernel does not report them."""
    with suppress(OSError, ValueError):
        package = int(Path(_TOPOLOGY.format(core, "physical_package_id")).read_text())
        return package, int(Path(_TOPOLOGY.format(core, "core_id")).read_text())
    return 0, core
