"""The sources of a master's nodes: processes that it starts, ranks of a launcher, or joining workers."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeAlias

from ... import rpc
from ...backend.registry import MPI, backend_factory
from ...common.formatting import counted, format_seconds
from ...common.mpi_library import check_world
from ...errors import LaunchError, RendezvousTimeout, UnknownWorker, UsageError, WorkerLost
from ...initialize import default_url
from ...net import Deadline
from ...rendezvous.point import RendezvousPoint, open_point
from ...rendezvous.venue import parse_url
from ...store import TCPStoreServer
from ..node.serving import join, serve_rank
from ..protocol.workers import MASTER, JoinedWorker, join_queue
from .processes import NodeProcesses

#: seconds between two checks whether a started process has ended before joining
_POLL_INTERVAL_S = 0.2


#: a worker that becomes a node: what calls it, and how it joined
NodeWorker: TypeAlias = tuple[rpc.Peer, JoinedWorker]


class WorkerSource:
    """The master's agent, and the workers that join it.

    On ranks of a launcher other than 0 the constructor does not return: it serves the master and exits.

    Args:
        workers: number of workers to start on this machine; None: none.
        url: where workers join; None: that of the launcher, or only workers started here.
        secret: secret of the job.
        timeout: seconds to open the rendezvous point.
        backend: data channel of collectives between nodes.

    Attributes:
        agent: the master's agent of :mod:`shoal.rpc`.
        count: initial number of nodes.
    """

    def __init__(
        self, workers: int | None, url: str | None, secret: str | bytes | None, timeout: float, backend: str
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: NodeProcesses | None = None
        self._url = url
        self._backend = backend
        self._launched = workers is None and url is None
        self.count = workers or 0
        try:
            if self._launched:
                place = self._open_launched(secret, timeout)
            else:
                place = self._open_url(url, workers, secret, timeout)
            # The import takes a second, during which the started processes start too.
            import_module("shoal.controller.tensor.prediction")
            self.agent = _master(place)
            self._stack.callback(self.agent.close, graceful=False)
            self._arrivals = join_queue(self.agent)
            self.agent.on_connection_lost(self._arrivals.remove)
        except BaseException:
            self.close()
            raise

    def _open_launched(self, secret: str | bytes | None, timeout: float) -> RendezvousPoint:
        uses_mpi = self._backend == MPI
        place = open_point(default_url(backend_factory(self._backend)), timeout=timeout, secret=secret)
        rank, size = place.venue.rank, place.venue.size
        try:
            if uses_mpi:  # also at a store that the environment names
                check_world(rank, size, "the launcher")
        except BaseException:
            place.close()
            raise
        if rank is None or size is None or size < 2:
            place.close()
            if uses_mpi:
                raise UsageError(
                    "init_master_worker(backend='mpi'): this process is alone, and MPI's launcher must start "
                    "the master and all nodes: mpiexec -n 3 python program.py, for a master and two nodes"
                )
            ranks = "no ranks" if rank is None or size is None else counted(size, "rank")
            raise UsageError(
                f"init_master_worker: the launcher started {ranks}, and a master needs at least 2; pass "
                "workers=n to start workers on this machine, or the url= where `shoal worker` joins"
            )
        if rank > 0:
            serve_rank(place, rank, timeout)
        self.count = size - 1
        return place

    def _open_url(
        self, url: str | None, workers: int | None, secret: str | bytes | None, timeout: float
    ) -> RendezvousPoint:
        if url is None:
            secret = secrets.token_hex(16)
            server = TCPStoreServer(secret=secret.encode()).start()
            self._stack.callback(server.close)
            url = server.url
        # The master starts the store if none listens there, as rank 0 of a job does.
        serves: dict[str, Any] = {"rank": 0, "size": 1} if parse_url(url).scheme == "tcp" else {}
        place = open_point(url, timeout=timeout, secret=secret, **serves)
        try:
            if workers is not None:
                self._processes = NodeProcesses(url, place.secret(), workers)
                self._stack.callback(self._processes.close)
                for index in range(workers):
                    self._processes.start(index)
        except BaseException:
            place.close()
            raise
        return place

    def take_started(self, index: int, deadline: Deadline) -> NodeWorker:
        """Wait for the worker started as node `index`; raises `LaunchError` or `RendezvousTimeout`."""
        return self._take(index, deadline, (index,))

    def take_joining(self, index: int, deadline: Deadline) -> NodeWorker:
        """Wait for the next worker that joins, as node `index`.

        Raises `UsageError` if no worker can join, or `RendezvousTimeout`.
        """
        if self._backend == MPI:
            raise UsageError(
                "init_master_worker(backend='mpi'): no worker can join this master, because MPI's launcher "
                "must start all nodes: give mpiexec -n a larger number"
            )
        if not self._launched and self._url is None:
            raise UsageError(
                "no worker can join this master: pass init_master_worker the url= where `shoal worker` joins"
            )
        return self._take(index, deadline, (index, None))

    def take_replacement(self, index: int, deadline: Deadline) -> NodeWorker:
        """Return a worker to replace a lost one: started here, if that one was, else the next that joins.

        Raises `UsageError`, `LaunchError` or `RendezvousTimeout`.
        """
        if self._processes is None or not self._processes.is_started(index):
            return self.take_joining(index, deadline)
        self._processes.start(index)
        return self.take_started(index, deadline)

    def requeue(self, arrival: JoinedWorker) -> None:
        """Return a worker that did not become a node; it can be taken again."""
        self._arrivals.add(arrival)

    def close(self) -> None:
        """Close the agent and the store, and end the processes."""
        self._stack.close()

    def _take(self, index: int, deadline: Deadline, fitting: tuple[int | None, ...]) -> NodeWorker:
        started = self._processes is not None and self._processes.is_started(index)

        def fits(arrival: JoinedWorker) -> bool:
            return arrival.index in fitting

        while True:
            arrival = self._arrivals.take(fits, min(_POLL_INTERVAL_S, deadline.remaining()))
            if arrival is not None:
                with contextlib.suppress(UnknownWorker, WorkerLost):  # it failed meanwhile
                    peer = self.agent.peer(arrival.name)
                    if started and self._processes is not None:
                        self._processes.mark_joined(index)
                    return peer, arrival
            elif started and self._processes is not None:
                self._processes.raise_if_ended(index)
            if deadline.expired:
                raise self._timeout_error(index, started, format_seconds(deadline.timeout))

    def _timeout_error(self, index: int, started: bool, seconds: str) -> Exception:
        if started:
            return LaunchError(f"node {index}, started by this master, did not join within {seconds}")
        if self._launched:
            return RendezvousTimeout(
                f"node {index}, which is rank {index + 1}, did not join within {seconds}"
            )
        return RendezvousTimeout(
            f"no worker joined as node {index} within {seconds}: start one by `shoal worker {self._url}`, "
            "with the same secret in SHOAL_SECRET"
        )


def _master(place: RendezvousPoint) -> rpc.Agent:
    # When it closes, the master does not wait for workers that still use its store.
    place = replace(place, venue=replace(place.venue, others_disconnected=None))
    try:
        return join(place, MASTER)
    except UsageError as error:
        raise UsageError(f"init_master_worker: this rendezvous point has another master: {error}") from None
