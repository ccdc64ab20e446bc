"""``shoal.init_master_worker`` and the class ``Master``."""

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
from ...backend.native.channel import checked_transport
from ...backend.registry import NATIVE, backend_factory
from ...common.arguments import checked_count, checked_seconds
from ...common.formatting import counted
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
#: numbers of spaces that replace lost ones; above every device index
_renewed = itertools.count(1000)
_ENDED = "its process ended, or its connection broke"
#: seconds for a node to finish issued operations when the master closes
_PATIENCE = 5.0
#: device index of the first place of several nodes; torch's device indices have 8 bits
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
    """Make this process the master of nodes: processes started here, ranks of a launcher, or joining workers.

    Node ``i`` becomes the torch device ``node:i``. A process has at most one master at a time.

    Without `workers` and `url`, all ranks of ``shoal run``, torchrun, Slurm or mpiexec call this: rank 0
    becomes the master, rank ``i`` its node ``i - 1``. On the nodes the call does not return: it serves the
    master and exits the process with code 0 when the master ends.

    Args:
        workers: number of nodes to start on this machine, as processes that end with this one.
        url: where workers started by ``shoal worker URL`` join, as for :func:`shoal.init`; the master starts
            the store of a ``tcp://`` address if none listens there. Workers become nodes in
            :meth:`Master.wait_for`.
        secret: the job's secret; None: as for :func:`shoal.init`.
        timeout: seconds for the nodes to start.
        backend: data channel of collectives between nodes: "native", or a backend that a package installed
            on the workers registers.
        transport: transport of the native backend, as for :func:`shoal.init`; ``"tcp"``: no shared memory.
        imports: names of modules that every node imports first: those that register user-defined operators.

    Raises:
        UsageError: this process or the rendezvous point already has a master, neither `workers`, `url` nor a
            launcher provides nodes, the backend is unknown, or a node cannot import a module.
        UnsupportedOperation: another package uses torch's PrivateUse1 device.
        LaunchError, RendezvousTimeout: a node did not start.
    """
    count = None if workers is None else checked_count("workers", workers)
    seconds = checked_seconds("timeout", timeout)
    modules = imports_of_nodes(imports)
    options = {} if transport is None else {"transport": checked_transport(transport)}
    if options and backend != NATIVE:
        raise UsageError(f"transport={transport!r} is an option of the native backend, not of {backend!r}")
    if current.opened() is not None:
        raise UsageError("this process already has an open master: close() it first")
    backend_factory(backend)
    device.register()
    workers_of_master = Workers(count, None if url == "env://" else url, secret, seconds)
    master = Master(workers_of_master, seconds, backend, options, modules)
    current.set_master(master)
    interrupts.protect()
    sending.give()
    return master


class Master(Seeing):
    """The master of nodes, made by :func:`init_master_worker`; a context manager that closes it.

    Attributes:
        name: name of its session with the nodes.
        strict: if True, an operation raises instead of waiting for a node to report the result's shape.
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
        #: also the seed of nodes that join later, so that all nodes of a place start with the same numbers
        self._seed = torch.initial_seed(), False
        self.name = f"{workers.agent.worker.incarnation}-{next(_numbers)}"
        self._roster = Roster(self.name, workers.agent)
        self._backend = backend
        self._options = options
        self._imports = imports
        self._pids: list[int] = []
        self._lines: list[NodeConnection] = []
        #: of nodes and of places of several nodes, by device index
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
        """The place of all nodes: a sequence of their devices."""
        return self.place(range(len(self._lines)))

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self._lines)

    def wait_for(self, count: int, timeout: float = 300.0) -> Place:
        """Add workers that join at the master's ``url`` until there are `count` nodes; return all nodes.

        Workers become nodes in the order in which they joined. Existing places do not change. A Ctrl-C ends
        the wait; nodes already added stay.

        Args:
            count: number of nodes to wait for.
            timeout: seconds.

        Raises:
            UsageError: the master has no ``url`` for workers to join.
            RendezvousTimeout: not enough workers joined within the timeout.
        """
        checked_count("count", count)
        deadline = Deadline(checked_seconds("timeout", timeout))
        while len(self._lines) < count:
            self._take(len(self._lines), self._workers.next, deadline)
        return self.nodes

    def replace(self, node: int | str | torch.device, timeout: float = 300.0) -> torch.device:
        """Replace a lost node by a new worker without tensors; return the node's device.

        The worker is started here if the lost one was, otherwise it is the next that joins. Tensors of the
        lost node and of places that contain it keep raising NodeLost; new tensors can be made on both.

        Args:
            node: index or device of the lost node.
            timeout: seconds for the worker to join.

        Raises:
            UsageError: the node is not lost, or the master has no ``url`` for workers to join.
            LaunchError, RendezvousTimeout: no worker joined within the timeout.
        """
        index = self.space(node if isinstance(node, int) else torch.device(node).index or 0).index
        if index >= len(self._lines) or self._lines[index].lost is None:
            raise UsageError(f"{self.space(index).nodes} was not lost: replace() takes a lost node")
        self._take(index, self._workers.again, Deadline(checked_seconds("timeout", timeout)))
        return self._spaces[index].device

    def _renew(self, index: int) -> None:
        """Give places that contain a replaced node new spaces; the caller holds the lock."""
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
        """Make the worker that ``how(index, deadline)`` returns node `index`."""
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
                send = partial(peer.bound_call(mailbox, sessions.run), self.name, 0)
                break
            except WorkerLost:
                continue  # it failed before it became a node
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
            with contextlib.suppress(NodeLost):  # it failed just now
                space.seed(seed + index * distinct)
            if ended:
                self._renew(index)
        for each in ended:
            each.close(each.lost or NodeLost(_ENDED))
        if died:
            self._lost(peer.name)

    def space(self, index: int) -> Space:
        """Return the space of ``node:index``, a node or a place; raises `UsageError` if there is none."""
        space = self._spaces.get(index)
        if space is None:
            raise UsageError(f"there is no node:{index}: the nodes are 0 to {len(self._lines) - 1}")
        return space

    def place(self, nodes: Named) -> Place:
        """Return the place of these nodes; the same object for the same nodes.

        Args:
            nodes: indices or devices, also of places, in any order.

        Raises:
            UsageError: there is no such node, none is given, or no torch device index is left.
        """
        with self._lock:
            if not self._lines:
                raise UsageError("no worker has joined yet: call wait_for(n) to wait for n nodes")
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
                f"there are {len(self._places)} places, and torch has no index left for another one: places "
                "are kept until the master is closed"
            )
        space = self._spaces[index] = self._new_space(torch.device("node", index), indices)
        return space

    def streams(self) -> Streams:
        """Return the streams of the nodes, created on the first call."""
        with self._lock:
            if self._streams is None:
                self._streams = Streams(self._spaces.values())
            return self._streams

    def synchronize(self) -> None:
        """Wait until the nodes have done everything that was issued.

        Raises:
            RemoteOpError: an operation failed and its error was not raised before.
            NodeLost: a node was lost.
        """
        for line in self._lines:
            with self._lock:
                line.flush()
        for line in self._lines:
            line.synchronize()

    def fetch(self, tensors: Iterable[torch.Tensor]) -> Future[list[torch.Tensor]]:
        """Request copies of many tensors at once; raises UsageError for a tensor on several nodes.

        Returns:
            a future of the copies, with the values at this point of the program; its ``wait()`` raises
            RemoteOpError if one of them could not be computed, and NodeLost if a node was lost.
        """
        return fetch_all(tensors)

    def call(self, place: Named, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` on a node, after everything issued before, and wait for the result.

        Tensors of the node in the arguments are passed to `fn` as the node's real tensors, which it may
        change; tensors in the result stay on the node. Everything else is pickled. A function of the main
        program is pickled by value, which needs cloudpickle.

        Args:
            place: the node; with several nodes, each calls the function with its part of a place's tensors.
            fn: the function.

        Returns:
            the result; for several nodes a list with one result per node.

        Raises:
            UsageError: a tensor is on another node, or an argument cannot be pickled.
            RemoteOpError: the function failed, or an argument could not be computed.
            NodeLost: a node was lost.
        """
        return call(self.place(place).space.parts, fn, args, kwargs)

    def load(self, place: Named, make_loader: Callable[[int, int], Iterable[Any]]) -> Iterator[Any]:
        """Run a loader on each node; return an iterator over the batches, whose tensors stay on the nodes.

        A thread of the node reads two batches ahead, and the master requests the metadata of two, so neither
        waits for the other, even if the last batch is smaller. Leaving the loop, also by ``break``, ends the
        loaders.

        Args:
            place: the nodes. With several nodes, the tensors that the loaders return become the parts of one
                tensor on the place and must have equal metadata; values that are not tensors are taken from
                the first node. The loop ends with the shortest loader.
            make_loader: ``make_loader(index, count)`` is called on each node with its position in the place
                and the number of nodes, and returns an iterable of batches: tuples, lists or dictionaries of
                tensors and other values.

        Raises:
            RemoteOpError: a loader failed; raised instead of the failed batch.
            UsageError: the batches differ in structure or metadata, or `make_loader` cannot be pickled.
            NodeLost: a node was lost.
        """
        return load(self.place(place), make_loader)

    def seed(self, seed: int, *, distinct: bool = False) -> None:
        """Seed the random generators of all nodes; ``torch.manual_seed`` does it too.

        Args:
            seed: the seed; nodes then draw the same numbers as torch on the CPU.
            distinct: seed node ``i`` with ``seed + i`` instead.
        """
        with self._lock:
            self._seed = seed, distinct
            for index in range(len(self._lines)):
                with contextlib.suppress(NodeLost):
                    self._spaces[index].seed(seed + index * distinct)

    def recorded(self, fn: Callable[..., Any]) -> Recorded:
        """Wrap a function: once its calls issue equal commands, a call is replayed as one command per node.

        Use ``@master.recorded`` or ``step = master.recorded(step)``. Only operations on tensors of nodes are
        replayed, not other Python code of the function; see ``docs/controller.md``. A call that cannot be
        replayed raises RecordingMismatch.
        """
        return Recorded(fn, self._spaces.values)

    def on_lost(self, fn: Callable[[int], Any]) -> None:
        """Call ``fn(index)`` once in another thread when a node is lost."""
        if not callable(fn):
            raise UsageError(f"on_lost expects a callable, got {fn!r}")
        self._on_lost.append(fn)

    def close(self) -> None:
        """End the nodes, each after at most 5 seconds for issued operations; their tensors raise NodeLost.

        Warns about failures that were not raised, and if too many operations were new to the nodes.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        self._swapping.close()
        if current.opened() is self:
            current.set_master(None)
            sending.take_away()
            restore_thread()  # other threads do so when they start a backward pass
        try:
            unseen = self._end()
        finally:
            interrupts.unprotect()
        if slow := misses_of(self._spaces.values()):
            warnings.warn(slow, stacklevel=2)
        if unseen:
            warnings.warn(
                f"{len(unseen)} operations failed and their errors were not raised, the first: {unseen[0]}",
                stacklevel=2,
            )

    def become_forked(self) -> None:
        """Disconnect from the nodes in a forked child: they belong to the parent."""
        reset: Any = self._lock  # a thread of the parent may have held it
        reset._at_fork_reinit()
        why = self._forked()
        for line in self._lines:
            disconnect(line, why)

    def _forked(self) -> ForkedProcess:
        return ForkedProcess(f"the nodes belong to process {self._pid}; this process is a fork of it")

    def _end(self) -> list[str]:
        """End the nodes; return the failures that were not raised."""
        for line in self._lines:
            line.finish(_PATIENCE)
        unseen = [text for line in self._lines for text in line.unseen()]
        for line in self._lines:
            why = f"node {line.index} is closed: its master was closed"
            line.close(NodeLost(why, node_name(line.index), (line.index,)))
        self._standstills.close()
        self._workers.close()
        return unseen

    def _give_up(self, name: str, why: str) -> None:
        """Treat a worker as lost although the connection to it is open."""
        self._lost(name, why)
        agent = self._workers.agent
        connection = agent.connections.existing(name)
        if connection is not None:  # dropping it ends all waits for the worker
            agent.endpoint.post.drop(connection.number, why)

    def _lost(self, name: str, why: str = _ENDED) -> None:
        line = self._roster.lose(name, why)
        if line is None:
            return  # already lost by another of its connections, or not a node
        for fn in list(self._on_lost):
            try:
                fn(line.index)
            except BaseException:
                with contextlib.suppress(BaseException):  # a user's logging handler may raise
                    _logger.exception("a callback of Master.on_lost failed for node %d", line.index)

    @property
    def pids(self) -> list[int]:
        """Process ids of the nodes, each on its own machine."""
        return list(self._pids)

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        nodes = counted(len(self._lines), "node")
        return f"<shoal.controller.Master of {nodes}{', closed' if self._closed else ''}>"
