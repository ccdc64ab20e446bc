"""Ranks that are real processes and meet in every way that there is, for tests of how init ends."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import shoal
from shoal.backend.native import mesh
from shoal.rendezvous import job_record
from shoal.rendezvous.protocol import Rendezvous
from shoal.testing.processes import fork_server
from shoal.testing.worker import attach

from .ports import free_port

SECRET = "a secret of the tests"
#: seconds after which a rank that has not come to an end hangs
PATIENCE = 60.0

#: the ways to meet
WAYS = ("tcp", "file", "launched", "torchrun", "torch_tcp", "torch_file", "backend_tcp", "backend_file")

#: where a rank can be killed: the method whose call is its end
PHASES: dict[str, tuple[type, str]] = {
    "before it claims its rank": (Rendezvous, "_claim"),
    "when it has its rank": (Rendezvous, "_await_completion"),
    "before it says where it listens": (mesh._MeshBuilder, "_exchange_addresses"),
    "before it connects": (mesh._MeshBuilder, "_connect_to"),
    "while it connects": (mesh._MeshBuilder, "_introduce"),
    "before it says that it is connected": (mesh._MeshBuilder, "_exchange_shared_memory_ranks"),
}


@dataclass(frozen=True)
class End:
    """How a rank's start ended: 0 or the signal that killed it, or what ``init`` raised and when."""

    code: int
    error: str = ""
    at: float = 0.0


class Start:
    """All ranks of a job, started at ``where`` in the way ``way``.

    Args:
        way: one of :data:`WAYS`.
        where: a path for files, ``host:port`` for the others.
        size: number of ranks.
        ranks: those that are started here; None: all.
        pauses: seconds that each rank waits first.
        dies: the phase in which each of these ranks is killed.
        leave: "exit" ends a rank the moment ``init`` returns, "close" closes its group before, and
            "two worlds" makes a second one and uses both.
        hears_late: seconds after which ranks but 0 hear that the others are connected.
        options: of ``shoal.init``.
    """

    def __init__(
        self,
        way: str,
        where: str,
        size: int,
        *,
        ranks: Sequence[int] | None = None,
        pauses: Sequence[float] = (),
        dies: dict[int, str] | None = None,
        leave: str = "exit",
        hears_late: float = 0.0,
        timeout: float = PATIENCE,
        **options: Any,
    ) -> None:
        self._reports: list[Connection] = []
        self._ends: list[End] | None = None
        self.processes = []
        for rank in range(size) if ranks is None else ranks:
            ours, peer_hello = Pipe(duplex=False)
            pause = pauses[rank] if pauses else 0.0
            spoil = ((dies or {}).get(rank), pause, hears_late if rank else 0.0)
            arguments = (way, where, rank, size, spoil, leave, {"timeout": timeout, **options}, peer_hello)
            process = fork_server().Process(target=_come, args=arguments)
            process.start()
            peer_hello.close()
            self._reports.append(ours)
            self.processes.append(process)

    def kill(self, index: int) -> None:
        """End a rank at once."""
        self.processes[index].kill()

    def ends(self) -> list[End]:
        """How each rank ended."""
        if self._ends is None:
            self._ends = [self._end(index) for index in range(len(self.processes))]
        return self._ends

    def _end(self, index: int) -> End:
        process, reports = self.processes[index], self._reports[index]
        process.join(PATIENCE)
        assert process.exitcode is not None, f"rank {index} hangs"
        try:
            error, at = reports.recv()
        except EOFError:
            error, at = "", 0.0
        return End(process.exitcode, error, at)

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *_: object) -> None:
        for process, reports in zip(self.processes, self._reports, strict=True):
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            reports.close()


def place(way: str, directory: Path) -> str:
    """A place of its own for the way."""
    if way.endswith("file") or way == "torchrun":
        return str(directory / "meet")
    return f"127.0.0.1:{free_port()}"


@contextmanager
def served(way: str, where: str, size: int) -> Any:
    """The store of ways in which somebody else serves it, as ``shoal run`` does."""
    if way != "launched":
        yield
        return
    host, port = where.split(":")
    with shoal.TCPStoreServer(host, int(port), SECRET.encode(), records=job_record(size)):
        yield


def _come(
    way: str,
    where: str,
    rank: int,
    size: int,
    spoil: tuple[str | None, float, float],
    leave: str,
    options: dict[str, Any],
    reports: Connection,
) -> None:
    attach(reports)
    dies, pause, hears_late = spoil
    if dies is not None:
        _die_at(*PHASES[dies])
    if hears_late:
        _hear_late(hears_late)
    time.sleep(pause)
    try:
        if way.startswith("backend_"):
            url = f"{way.removeprefix('backend_')}://{where}"
            dist.init_process_group("shoal", init_method=url, rank=rank, world_size=size)
        elif leave == "two worlds":
            _two_worlds(_reach_store(way, where, rank, size), rank, size, options)
        else:
            group = shoal.init(**_reach_store(way, where, rank, size), **options)
        if leave == "exit":
            os._exit(0)
        if way.startswith("backend_"):
            dist.destroy_process_group()
        elif leave == "close":
            group.close()
    except BaseException as error:
        reports.send((f"{type(error).__name__}: {error}", time.monotonic()))
        os._exit(1)


def _die_at(owner: type, name: str) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)


def _hear_late(seconds: float) -> None:
    class LatePoll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, timeout: float) -> Any:
            time.sleep(seconds)
            return self._poll.poll(timeout)

    # What connecting waits with once this rank has said that it is connected.
    mesh.select = SimpleNamespace(poll=LatePoll, POLLIN=select.POLLIN)  # type: ignore[attr-defined]


def _reach_store(way: str, where: str, rank: int, size: int) -> dict[str, Any]:
    """The arguments of ``init`` with which a rank meets the others."""
    if way == "launched":
        os.environ |= {
            "SHOAL_STORE": f"tcp://{where}",
            "SHOAL_RANK": str(rank),
            "SHOAL_SIZE": str(size),
            "SHOAL_SECRET": SECRET,
        }
        return {}
    if way == "torchrun":
        tempfile.tempdir = str(Path(where).parent)  # where private files go
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return {}
    if way == "torch_tcp":
        host, port = where.split(":")
        store = dist.TCPStore(host, int(port), size, rank == 0, wait_for_workers=False)
        return {"store": store, "rank": rank, "size": size}
    if way == "torch_file":
        # The last of its users removes torch's file, so torch is told of one more.
        return {"store": dist.FileStore(where, size + 1), "rank": rank, "size": size}
    return {"url": f"{way}://{where}", "rank": rank, "size": size, "secret": SECRET}


def _two_worlds(arguments: dict[str, Any], rank: int, size: int, options: dict[str, Any]) -> None:
    first = shoal.init(**arguments, **options)
    # With the ranks in another order, so that another process would serve the store.
    reversed_ranks = {**arguments, "rank": size - 1 - rank, "size": size}
    second = shoal.init(**reversed_ranks, **options, job="second")
    assert (first.rank, second.rank) == (rank, size - 1 - rank)
    for group, other in ((first, second), (second, first)):
        total = group.all_reduce(torch.tensor([float(group.rank)]))
        assert other.broadcast(torch.tensor([float(other.rank)]), root=1).wait().item() == 1.0
        assert total.wait().item() == size * (size - 1) / 2
    first.close()
    second.store.set(f"still here/{second.rank}", b"")
    second.store.wait([f"still here/{each}" for each in range(size)])
    half = second.split(color=0)
    assert half is not None
    assert half.all_reduce(torch.ones(1)).wait().item() == size
    second.close()
