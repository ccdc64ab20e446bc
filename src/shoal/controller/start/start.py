"""How a master gets its nodes: it starts them, a launcher has started them, or they join by themselves."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ... import rpc
from ...common.wording import counted, in_seconds
from ...errors import LaunchError, RendezvousTimeout, UnknownWorker, UsageError, WorkerLost
from ...net import Deadline
from ...rendezvous.place import RendezvousPoint, open_place
from ...rendezvous.venue import parse_url
from ...store import TCPStoreServer
from ..node.serving import join, serve_rank
from ..protocol.joining import JoiningWorker, arrivals_at
from ..protocol.naming import MASTER
from .launching import Processes

#: seconds between looks at whether a process that was started and has not joined is still there
_LOOK = 0.2


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A worker that becomes a node.

    Attributes:
        peer: calls it.
        arrival: how it came.
    """

    peer: rpc.Peer
    arrival: JoiningWorker


class Workers:
    """The master's agent, and the workers that come to it.

    A rank that is no master stays in here, and its process ends.

    Args:
        workers: how many to start on this machine; None: none.
        url: where workers join; None: what a launcher says, or nobody who was not started here.
        secret: of the job.
        timeout: seconds for the place.

    Attributes:
        agent: the master, as a worker of :mod:`shoal.rpc`.
        count: nodes that are there from the beginning.
    """

    def __init__(
        self, workers: int | None, url: str | None, secret: str | bytes | None, timeout: float
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: Processes | None = None
        self._url = url
        self._launched = workers is None and url is None
        self.count = workers or 0
        try:
            if self._launched:
                place = self._of_launcher(secret, timeout)
            else:
                place = self._at(url, workers, secret, timeout)
            # It takes a second, as the start of processes does.
            import_module("shoal.controller.tensor.prediction")
            self.agent = _master(place)
            self._stack.callback(self.agent.close, graceful=False)
            self._arrivals = arrivals_at(self.agent)
            self.agent.on_lost(self._arrivals.go)
        except BaseException:
            self.close()
            raise

    def _of_launcher(self, secret: str | bytes | None, timeout: float) -> RendezvousPoint:
        place = open_place(timeout=timeout, secret=secret)
        rank, size = place.venue.rank, place.venue.size
        if rank is None or size is None or size < 2:
            place.close()
            ranks = "no ranks" if rank is None or size is None else counted(size, "rank")
            raise UsageError(
                f"init_master_worker: a launcher has started {ranks}, and a master needs at least 2; say how "
                "many workers=n to start here, or give the url= at which `shoal worker` joins"
            )
        if rank > 0:
            serve_rank(place, rank, timeout)
        self.count = size - 1
        return place

    def _at(
        self, url: str | None, workers: int | None, secret: str | bytes | None, timeout: float
    ) -> RendezvousPoint:
        if url is None:
            secret = secrets.token_hex(16)
            server = TCPStoreServer(secret=secret.encode()).start()
            self._stack.callback(server.close)
            url = server.url
        # Where nobody listens the master starts the store, as rank 0 of a job does.
        serves: dict[str, Any] = {"rank": 0, "size": 1} if parse_url(url).scheme == "tcp" else {}
        place = open_place(url, timeout=timeout, secret=secret, **serves)
        try:
            if workers is not None:
                self._processes = Processes(url, place.secret(), workers)
                self._stack.callback(self._processes.close)
                for index in range(workers):
                    self._processes.start(index)
        except BaseException:
            place.close()
            raise
        return place

    def first(self, index: int, deadline: Deadline) -> NodeWorker:
        """The worker that was started as node ``index``.

        Raises:
            LaunchError, RendezvousTimeout: it did not come.
        """
        return self._next(index, deadline, (index,))

    def next(self, index: int, deadline: Deadline) -> NodeWorker:
        """The next worker that joins, as node ``index``.

        Raises:
            UsageError: nobody can join.
            RendezvousTimeout: nobody came.
        """
        if not self._launched and self._url is None:
            raise UsageError(
                "nobody can join this master: give init_master_worker the url= at which `shoal worker` joins"
            )
        return self._next(index, deadline, (index, None))

    def again(self, index: int, deadline: Deadline) -> NodeWorker:
        """A new worker in the place of a lost one: started here, if that one was, else the next that joins.

        Raises:
            UsageError, LaunchError, RendezvousTimeout: there is none.
        """
        if self._processes is None or not self._processes.has(index):
            return self.next(index, deadline)
        self._processes.start(index)
        return self.first(index, deadline)

    def give_back(self, worker: NodeWorker) -> None:
        """The worker did not become a node yet."""
        self._arrivals.come(worker.arrival)

    def close(self) -> None:
        """End the processes, and let go of everything."""
        self._stack.close()

    def _next(self, index: int, deadline: Deadline, fitting: tuple[int | None, ...]) -> NodeWorker:
        started = self._processes is not None and self._processes.has(index)

        def fits(arrival: JoiningWorker) -> bool:
            return arrival.index in fitting

        while True:
            arrival = self._arrivals.take(fits, min(_LOOK, deadline.remaining()))
            if arrival is not None:
                with contextlib.suppress(UnknownWorker, WorkerLost):  # it has ended meanwhile
                    worker = NodeWorker(self.agent.peer(arrival.name), arrival)
                    if started and self._processes is not None:
                        self._processes.joined(index)
                    return worker
            elif started and self._processes is not None:
                self._processes.check(index)
            if deadline.expired:
                raise self._late(index, started, in_seconds(deadline.timeout))

    def _late(self, index: int, started: bool, seconds: str) -> Exception:
        if started:
            return LaunchError(f"node {index}, which was started here, has not joined within {seconds}")
        if self._launched:
            return RendezvousTimeout(
                f"node {index}, which is rank {index + 1}, has not come within {seconds}"
            )
        return RendezvousTimeout(
            f"nobody has joined as node {index} within {seconds}: `shoal worker {self._url}` does, with the "
            "same secret in SHOAL_SECRET"
        )


def _master(place: RendezvousPoint) -> rpc.Agent:
    # At its end the master does not wait for workers that still ask something of the store that it serves.
    place = replace(place, venue=replace(place.venue, alone=None))
    try:
        return join(place, MASTER)
    except UsageError as error:
        raise UsageError(f"init_master_worker: this place has another master: {error}") from None
