"""``shoal.init_master_worker``: this process as the master of nodes."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ... import config
from ...backend.native.options import checked_transport
from ...backend.registry import NATIVE, backend_factory
from ...common.keywords import checked_count, checked_seconds
from ...common.wording import counted
from ...errors import ForkedProcess, NodeLost, UsageError, WorkerLost
from ...future import Future
from ...net import Deadline
from ..commands import interrupts
from ..commands.connecting import connect, disconnect
from ..commands.line import NodeConnection
from ..commands.space import Space
from ..node import sessions
from ..protocol.imports import checked as imports_of_nodes
from ..protocol.naming import node_name
from ..recording.recorded import Recorded
from ..start.roster import Roster
from ..start.standstills import Standstills
from ..start.start import NodeWorker, Workers
from ..tensor import current
from ..tensor.autograd import restore_thread
from ..tensor.calls import misses_of
from ..tensor.ordering import Streams
from ..tensor.swapping import Swapping
from ..tensor.transfer import fetch_all
from . import device
from . import dist_send as sending
from .forgetting import forget_spaces, forget_what_is_over
from .functions import call
from .inspection import Seeing
from .loader import load
from .place import Named, Place, indices_of

_logger = logging.getLogger("shoal")
_numbers = itertools.count()
#: numbers of spaces in the place of lost ones, which no device's index is
_renewed = itertools.count(1000)
_ENDED = "its process ended, or its connection broke"
#: seconds that a node gets for what was issued before the master closed
_PATIENCE = 5.0
#: index of the first place of several nodes: torch's device indices are of 8 bits
_HIGHEST = 126


def init_master_worker(
    *,
    workers: int | None = None,
    url: str | None = None,
    secret: str | bytes | None = None,
    timeout: float = 300.0,
    backend: str = "native",
    transport: str | None = None,
    imports: Sequence[str] = (),
) -> Master:
    """Become the master of nodes, which are processes started here, ranks of a launcher, or whoever joins.

    Node ``i`` is the torch device ``node:i`` from then on.  A process has one master at a time.

    Without ``workers`` and ``url`` this is called by all ranks of ``shoal run``, torchrun, Slurm or mpiexec:
    rank 0 becomes the master, rank ``i`` is its node ``i - 1``.  There the call does not return: it serves
    the master, and ends the process with exit code 0 when that ends.

    Args:
        workers: how many nodes to start on this machine, as processes that end with this one.
        url: where workers join by themselves (``shoal worker URL``), as of :func:`shoal.init`; the master
            starts the store of a ``tcp://`` place where none listens.  They become nodes by
            :meth:`Master.wait_for`.
        secret: the job's; None: as for :func:`shoal.init`.
        timeout: seconds for the nodes to start.
        backend: the data channel of collectives of several nodes: "native", or one that a package which the
            workers have registers.
        transport: how that channel of the native backend moves bytes, as of :func:`shoal.init`; ``"tcp"``:
            without shared memory.
        imports: names of modules that every node imports before it is one: those that register the program's
            own operators with torch.

    Raises:
        UsageError: this process is a master already, the place has one, nothing says what the nodes are,
            there is no such backend, or a node cannot import a module.
        UnsupportedOperation: torch cannot take such a device.
        LaunchError, RendezvousTimeout: a node did not start.
    """
    count = None if workers is None else checked_count("workers", workers)
    seconds = checked_seconds("timeout", timeout)
    modules = imports_of_nodes(imports)
    options = {} if transport is None else {"transport": checked_transport(transport)}
    if options and backend != NATIVE:
        raise UsageError(f"transport={transport!r} is an option of the native backend, not of {backend!r}")
    if current.opened() is not None:
        raise UsageError("this process is a master already: close() that one first")
    backend_factory(backend)
    device.register()
    workers_of_master = Workers(count, None if url == "env://" else url, secret, seconds)
    master = Master(workers_of_master, seconds, backend, options, modules)
    current.set_master(master)
    interrupts.protect()
    sending.give()
    return master


class Master(Seeing):
    """The master of nodes; made by :func:`init_master_worker`, and a context manager that closes it.

    Attributes:
        name: of its session with the nodes.
        strict: whether an operation is an error that would wait for a node to tell the shape of its result.
    """

    def __init__(
        self,
        workers: Workers,
        timeout: float,
        backend: str,
        options: dict[str, str],
        imports: Sequence[str],
    ) -> None:
        self._workers = workers
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self.strict = False
        self._on_lost: list[Callable[[int], Any]] = []
        #: the seed for nodes that come later too, so that all nodes of a place begin with the same numbers
        self._seed = torch.initial_seed(), False
        self.name = f"{workers.agent.worker.incarnation}-{next(_numbers)}"
        self._roster = Roster(self.name, workers.agent)
        self._backend = backend
        self._options = options
        self._imports = imports
        self._pids: list[int] = []
        self._lines: list[NodeConnection] = []
        #: of nodes and of places of several, by the index of their device
        self._spaces: dict[int, Space] = {}
        self._places: dict[tuple[int, ...], Place] = {}
        self._streams: Streams | None = None
        workers.agent.on_lost(self._lost)
        self._standstills = Standstills(
            workers.agent, self._roster.names, self._give_up, config.HEARTBEAT_TIMEOUT.get()
        )
        try:
            deadline = Deadline(timeout)
            for index in range(workers.count):
                self._take(index, workers.first, deadline)
        except BaseException:
            self._end()
            raise
        self._swapping = Swapping()
        atexit.register(self.close)

    @property
    def nodes(self) -> Place:
        """The place of all nodes, a sequence of their devices."""
        return self.place(range(len(self._lines)))

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return len(self._lines)

    def wait_for(self, count: int, timeout: float = 300.0) -> Place:
        """Take in workers that join at the master's ``url`` until there are ``count`` nodes; all nodes.

        They become nodes in the order in which they have come, and places that there are already stay as they
        are.  A Ctrl-C ends the wait; nodes that were taken in stay.

        Args:
            timeout: seconds.

        Raises:
            UsageError: nobody can join.
            RendezvousTimeout: not enough came in time.
        """
        checked_count("count", count)
        deadline = Deadline(checked_seconds("timeout", timeout))
        while len(self._lines) < count:
            self._take(len(self._lines), self._workers.next, deadline)
        return self.nodes

    def replace(self, node: int | str | torch.device, timeout: float = 300.0) -> torch.device:
        """Give the index of a node that was lost to a new worker, which begins with nothing.

        It is started here if the lost one was, and else the next that joins.  Tensors of the lost node, and
        of places that it was in, raise NodeLost for good.  New ones can be made there, and on these places.

        Args:
            timeout: seconds for the worker to come.

        Raises:
            UsageError: the node is there, or nobody can join.
            LaunchError, RendezvousTimeout: no worker came.
        """
        index = self.space(node if isinstance(node, int) else torch.device(node).index or 0).index
        if index >= len(self._lines) or self._lines[index].lost is None:
            raise UsageError(f"{self.space(index).nodes} was not lost, so nothing can replace it")
        self._take(index, self._workers.again, Deadline(checked_seconds("timeout", timeout)))
        return self._spaces[index].device

    def _renew(self, index: int) -> None:
        """Begin the places anew that have a node which was replaced; the caller holds the lock."""
        forget_what_is_over(self._lines, self._streams)
        for indices, place in self._places.items():
            if index in indices:
                place.space = self._spaces[place.space.index] = self._new_space(
                    place.device, indices, next(_renewed)
                )

    def _new_space(self, device: torch.device, indices: tuple[int, ...], number: int | None = None) -> Space:
        parts = tuple(self._spaces[index] for index in indices)
        if len(parts) == 1:
            return parts[0]
        lines = tuple(part.lines[0] for part in parts)
        return Space(device, lines, self._lock, parts, number)

    def _take(self, index: int, how: Callable[[int, Deadline], NodeWorker], deadline: Deadline) -> None:
        """Make the worker that ``how`` gives node ``index``."""
        if self._pid != os.getpid():
            raise self._forked()
        while True:
            worker = how(index, deadline)
            peer = worker.peer.options(timeout=math.inf)
            epoch, others = self._roster.members(index)
            try:
                begun = peer.call(
                    sessions.begin, self.name, index, epoch, self._backend, self._options, others,
                    self._imports,
                )  # fmt: skip
                mailbox, gpus, within = begun.wait()
                send = partial(peer.over_line(mailbox, sessions.run), self.name, 0)
                break
            except WorkerLost:
                continue  # it died just now, and never was a node
            except BaseException:  # a Ctrl-C
                self._workers.give_back(worker)
                raise
        with self._lock:
            line = NodeConnection(index, self._lock, send, self._lines, epoch, gpus, within)
            connect(line, peer, self.name, self._streams)
            ended = self._lines[index : index + 1]
            for each in ended:
                forget_spaces(each)
            line.before = ended[0].lost if ended else None
            space = self._spaces[index] = Space(torch.device("node", index), (line,), self._lock)
            self._lines[index : index + 1] = [line]
            self._pids[index : index + 1] = [worker.arrival.pid]
            died = self._roster.add(line, peer, others)
            seed, distinct = self._seed
            with contextlib.suppress(NodeLost):  # it died just now
                space.seed(seed + index * distinct)
            if ended:
                self._renew(index)
        for each in ended:
            each.close(each.lost or NodeLost(_ENDED))
        if died:
            self._lost(peer.name)

    def space(self, index: int) -> Space:
        """The space of the device ``node:index``, a node or a place of several.

        Raises:
            UsageError: there is no such node.
        """
        space = self._spaces.get(index)
        if space is None:
            raise UsageError(f"there is no node:{index}: the nodes are 0 to {len(self._lines) - 1}")
        return space

    def place(self, nodes: Named) -> Place:
        """Some of the nodes, as one place of tensors; the same one for the same nodes.

        Args:
            nodes: indices or devices, also of places; in any order.

        Raises:
            UsageError: there is no such node, none is named, or torch has no index left.
        """
        with self._lock:
            if not self._lines:
                raise UsageError("no worker has joined yet: wait_for(n) waits until n nodes are there")
            indices = indices_of(nodes, self.space)
            place = self._places.get(indices)
            if place is None:
                place = self._places[indices] = Place(self._space_of(indices), self.place)
            return place

    def _space_of(self, indices: tuple[int, ...]) -> Space:
        if len(indices) == 1:
            return self._spaces[indices[0]]
        index = min([_HIGHEST + 1, *(each for each in self._spaces if each >= len(self._lines))]) - 1
        if index < len(self._lines):
            raise UsageError(
                f"there are {len(self._places)} places, and torch has no index left for another one: a place "
                "lasts as long as its master"
            )
        space = self._spaces[index] = self._new_space(torch.device("node", index), indices)
        return space

    def streams(self) -> Streams:
        """The streams of the nodes, several from now on."""
        with self._lock:
            if self._streams is None:
                self._streams = Streams(self._spaces.values())
            return self._streams

    def synchronize(self) -> None:
        """Wait until the nodes have done all that was issued.

        Raises:
            RemoteOpError: an operation failed, of which no error was raised yet.
            NodeLost: a node died.
        """
        for line in self._lines:
            with self._lock:
                line.flush()
        for line in self._lines:
            line.synchronize()

    def fetch(self, tensors: Iterable[torch.Tensor]) -> Future[list[torch.Tensor]]:
        """Copies of many tensors here, for which the nodes are asked at once.

        Returns:
            a future of them, as the tensors are at this point of the program; its ``wait()`` raises
            RemoteOpError if one of them could not be computed, and NodeLost if a node died.

        Raises:
            UsageError: a tensor is on a place of several nodes.
        """
        return fetch_all(tensors)

    def call(self, place: Named, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` on a node, in the order of what was issued, and wait for what it gives.

        Tensors of nodes in the arguments are the node's own tensors there, which ``fn`` may change, and
        tensors in the result stay on the node.  The rest is pickled; a function of the program itself goes
        by value, for which cloudpickle is needed.

        Args:
            place: the node; on several nodes each runs the function, with its own of a place's tensors.

        Returns:
            the result; on several nodes a list, with an element for each.

        Raises:
            UsageError: a tensor is on another node, or an argument cannot be pickled.
            RemoteOpError: the function failed, or an argument could not be computed.
            NodeLost: a node died.
        """
        return call(self.place(place).space.parts, fn, args, kwargs)

    def load(self, place: Named, make_loader: Callable[[int, int], Iterable[Any]]) -> Iterator[Any]:
        """Run a loader on each node; an iterator over its batches, whose tensors stay on the nodes.

        A thread of the node reads two batches ahead, and the master knows the metadata of two, so neither
        waits for the other, nor for a shorter last batch.  The end of the loop, ``break`` too, ends the
        loaders.

        Args:
            place: of the batches.  On several nodes a tensor of a batch is one on the place, whose parts the
                nodes' loaders give: they must be alike, and the shortest loader ends the loop.  Of the first
                node's loader is whatever is no tensor.
            make_loader: ``make_loader(index, count)``, called on each node with its position in the place and
                the number of nodes, gives the batches: tuples, lists, dictionaries of tensors and others.

        Raises:
            RemoteOpError: a loader failed; in the place of its batch.
            UsageError: the nodes' batches differ in shape, or ``make_loader`` cannot be pickled.
            NodeLost: a node died.
        """
        return load(self.place(place), make_loader)

    def seed(self, seed: int, *, distinct: bool = False) -> None:
        """Seed the random generators of all nodes alike; ``torch.manual_seed`` does it too.

        Args:
            seed: what the CPU draws from it, nodes draw too.
            distinct: whether node ``i`` gets ``seed + i``.
        """
        with self._lock:
            self._seed = seed, distinct
            for index in range(len(self._lines)):
                with contextlib.suppress(NodeLost):
                    self._spaces[index].seed(seed + index * distinct)

    def recorded(self, fn: Callable[..., Any]) -> Recorded:
        """A function whose calls are replayed on the nodes as one command each, once they were alike.

        ``@master.recorded``, or ``step = master.recorded(step)``.  ``docs/controller.md`` says what is
        replayed: what Python does in the function beside operations on tensors of nodes is not.

        Raises:
            RecordingMismatch: of its calls, when they cannot be replayed.
        """
        return Recorded(fn, self._spaces.values)

    def on_lost(self, fn: Callable[[int], Any]) -> None:
        """Call ``fn(index)`` once when a node has died or cannot be reached any more, in another thread."""
        if not callable(fn):
            raise UsageError(f"{fn!r} cannot be called when a node is lost")
        self._on_lost.append(fn)

    def close(self) -> None:
        """End the nodes, which get some seconds for what was issued; using their tensors raises NodeLost.

        Warns of operations that failed and whose errors were never raised, and if too many were of new kinds.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        self._swapping.close()
        if current.opened() is self:
            current.set_master(None)
            sending.take_away()
            restore_thread()  # others do so when they begin a backward pass
        try:
            unseen = self._end()
        finally:
            interrupts.unprotect()
        if slow := misses_of(self._spaces.values()):
            warnings.warn(slow, stacklevel=2)
        if unseen:
            warnings.warn(f"{len(unseen)} operations failed unseen, the first: {unseen[0]}", stacklevel=2)

    def become_forked(self) -> None:
        """This is the master in a forked child, which has none of the parent's nodes."""
        reset: Any = self._lock  # a thread of the parent may have had it
        reset._at_fork_reinit()
        why = self._forked()
        for line in self._lines:
            disconnect(line, why)

    def _forked(self) -> ForkedProcess:
        return ForkedProcess(f"the nodes belong to process {self._pid}, of which this one is a fork")

    def _end(self) -> list[str]:
        """End the nodes; what failed and nobody has seen."""
        for line in self._lines:
            line.finish(_PATIENCE)
        unseen = [text for line in self._lines for text in line.unseen()]
        for line in self._lines:
            why = f"node {line.index} is closed: its master was"
            line.close(NodeLost(why, node_name(line.index), (line.index,)))
        self._standstills.close()
        self._workers.close()
        return unseen

    def _give_up(self, name: str, why: str) -> None:
        """A worker cannot be used any more, though the connection to it is there."""
        self._lost(name, why)
        agent = self._workers.agent
        connection = agent.links.existing(name)
        if connection is not None:  # which ends what is waited for
            agent.endpoint.post.drop(connection.number, why)

    def _lost(self, name: str, why: str = _ENDED) -> None:
        line = self._roster.lose(name, why)
        if line is None:
            return  # each of its connections ends, and it need not be a node
        for fn in list(self._on_lost):
            try:
                fn(line.index)
            except BaseException:
                with contextlib.suppress(BaseException):  # of a logging handler of the user
                    _logger.exception("a callback of Master.on_lost failed for node %d", line.index)

    @property
    def pids(self) -> list[int]:
        """The processes of the nodes, each on its own machine."""
        return list(self._pids)

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        nodes = counted(len(self._lines), "node")
        return f"<shoal.controller.Master of {nodes}{', closed' if self._closed else ''}>"
