"""``shoal.init_master_worker`` and the class ``Master``."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...backend.native.options import checked_transport
from ...backend.registry import MPI, NATIVE, backend_factory
from ...common.arguments import checked_count, checked_seconds
from ...common.copy_refusal import refuses_copies
from ...common.formatting import counted
from ...common.mpi_library import mark_broken
from ...errors import ForkedProcess, NodeLost, UsageError, WorkerLost
from ...future import Future
from ...net import Deadline
from ..commands import interrupts
from ..commands.connection import NodeConnection
from ..commands.space import Space
from ..node import sessions
from ..protocol.workers import checked_imports, node_name
from ..recording.recorded_function import Recorded
from ..start.roster import Roster
from ..start.workers import NodeWorker, WorkerSource
from ..tensor import current
from ..tensor.autograd import restore_thread
from ..tensor.calls import misses_of
from ..tensor.stream_order import StreamOrder
from ..tensor.tensor import RemoteTensor
from ..tensor.transfer import fetch_all, patch_module_moves
from . import device
from .explain import Explanation, explain
from .functions import call, load
from .place import NodesLike, Place
from .spaces import SpaceTable
from .trace import Trace

_numbers = itertools.count()
#: seconds for a node to finish issued operations when the master closes
CLOSE_TIMEOUT_S = 5.0


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
        backend: data channel of collectives between nodes: "native", "mpi" (with ranks of mpiexec only), or a
            backend that a package installed on the workers registers.
        transport: transport of the native backend, as for :func:`shoal.init`; ``"tcp"``: no shared memory.
        imports: names of modules that every node imports first: those that register user-defined operators.

    Raises:
        UsageError: this process or the rendezvous point already has a master, neither `workers`, `url` nor a
            launcher provides nodes, the backend is unknown, or a node cannot import a module.
        ConfigurationError: the backend is "mpi", and the ranks are not those of one mpiexec.
        UnsupportedOperation: another package uses torch's PrivateUse1 device.
        LaunchError, RendezvousTimeout: a node did not start.
    """
    if backend == MPI and not (workers is None and url is None):
        raise UsageError(
            f"init_master_worker(backend='mpi'): {'url' if workers is None else 'workers'}=: MPI's launcher "
            "must start the master and all nodes: call it without workers= and url=, in a program that "
            "`mpiexec -n 3 python program.py` starts, for a master and two nodes"
        )
    count = None if workers is None else checked_count("workers", workers)
    seconds = checked_seconds("timeout", timeout)
    modules = checked_imports(imports)
    options = {} if transport is None else {"transport": checked_transport(transport)}
    if options and backend != NATIVE:
        raise UsageError(f"transport={transport!r} is an option of the native backend, not of {backend!r}")
    if current.opened() is not None:
        raise UsageError("this process already has an open master: close() it first")
    backend_factory(backend)
    device.register()
    workers_of_master = WorkerSource(count, None if url == "env://" else url, secret, seconds, backend)
    master = Master(workers_of_master, seconds, backend, options, modules)
    current.set_master(master)
    interrupts.protect()
    device.install_dist_send()
    return master


@refuses_copies(
    "a Master",
    "connections to its nodes",
    "Keep it outside of the object that you copy; each process creates one by shoal.init_master_worker()",
)
class Master:
    """The master of nodes, made by :func:`init_master_worker`; a context manager that closes it.

    Attributes:
        name: name of its session with the nodes.
        strict: if True, an operation raises instead of waiting for a node to report the result's shape.
    """

    def __init__(
        self,
        workers: WorkerSource,
        timeout: float,
        backend: str,
        options: dict[str, str],
        imports: Sequence[str],
    ) -> None:
        self._workers = workers
        self._pid = os.getpid()
        self._closed = False
        self.strict = False
        self._spaces = SpaceTable()
        self._lock = self._spaces.lock
        self._nodes = self._spaces.nodes
        self.name = f"{workers.agent.worker.incarnation}-{next(_numbers)}"
        self._roster = Roster(self.name, workers.agent)
        self._backend = backend
        self._options = options
        self._imports = imports
        self._pids: list[int] = []
        if backend == MPI:
            # The nodes of a closed master end too, and are not lost for MPI_Finalize.
            self._roster.callbacks.append(lambda _: None if self._closed else mark_broken())
        try:
            deadline = Deadline(timeout)
            for index in range(workers.count):
                self._add_node(index, workers.take_started, deadline)
        except BaseException:
            self._end()
            raise
        self._unpatch_modules = patch_module_moves()
        atexit.register(self.close)

    @property
    def nodes(self) -> Place:
        """The place of all nodes: a sequence of their devices."""
        return self.place(range(len(self._nodes)))

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self._nodes)

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
        while len(self._nodes) < count:
            self._add_node(len(self._nodes), self._workers.take_joining, deadline)
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
        if index >= len(self._nodes) or self._nodes[index].lost is None:
            raise UsageError(f"{self.space(index).nodes} was not lost: replace() takes a lost node")
        self._add_node(index, self._workers.take_replacement, Deadline(checked_seconds("timeout", timeout)))
        return self._spaces.space(index).device

    def _add_node(
        self, index: int, take_worker: Callable[[int, Deadline], NodeWorker], deadline: Deadline
    ) -> None:
        """Make the worker that ``take_worker(index, deadline)`` returns node `index`."""
        if self._pid != os.getpid():
            raise self._forked()
        while True:
            peer, arrival = take_worker(index, deadline)
            peer = peer.options(timeout=math.inf)
            epoch, others = self._roster.members(index)
            try:
                begun = peer.call(
                    sessions.begin, self.name, index, epoch, self._backend, self._options, others,
                    self._imports,
                )  # fmt: skip
                mailbox, gpus, within = begun.wait()
                run = peer.bound_call(mailbox, sessions.run)
                break
            except WorkerLost:
                continue  # it failed before it became a node
            except BaseException:  # a Ctrl-C
                self._workers.requeue(arrival)
                raise
        with self._lock:
            node = NodeConnection(
                index,
                self._lock,
                peer,
                self.name,
                run,
                self._nodes,
                epoch,
                gpus,
                within,
                self._spaces.ordering,
            )
            lost = self._spaces.add(node)
            self._pids[index : index + 1] = [arrival.pid]
            failed = self._roster.add(node, others)
            self._spaces.begin(node, replaces=bool(lost))
        for each in lost:
            each.close(each.lost or NodeLost("its process ended, or its connection broke"))
        if failed:
            self._roster.lose(peer.name)

    def space(self, index: int) -> Space:
        """Return the space of ``node:index``, a node or a place; raises `UsageError` if there is none."""
        return self._spaces.space(index)

    def place(self, nodes: NodesLike) -> Place:
        """Return the place of these nodes; the same object for the same nodes.

        Args:
            nodes: indices or devices, also of places, in any order.

        Raises:
            UsageError: there is no such node, none is given, or no torch device index is left.
        """
        return self._spaces.place(nodes)

    def streams(self) -> StreamOrder:
        """Return the streams of the nodes, created on the first call."""
        return self._spaces.streams()

    def synchronize(self) -> None:
        """Wait until the nodes have done everything that was issued.

        Raises:
            RemoteOpError: an operation failed and its error was not raised before.
            NodeLost: a node was lost.
        """
        for node in self._nodes:
            with self._lock:
                node.streams[0].flush()
        for node in self._nodes:
            node.synchronize()

    def fetch(self, tensors: Iterable[torch.Tensor]) -> Future[list[torch.Tensor]]:
        """Request copies of many tensors at once; raises UsageError for a tensor on several nodes.

        Returns:
            a future of the copies, with the values at this point of the program; its ``wait()`` raises
            RemoteOpError if one of them could not be computed, and NodeLost if a node was lost.
        """
        return fetch_all(tensors)

    def call(self, place: NodesLike, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    def load(self, place: NodesLike, make_loader: Callable[[int, int], Iterable[Any]]) -> Iterator[Any]:
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
        self._spaces.seed(seed, distinct)

    def recorded(self, fn: Callable[..., Any]) -> Recorded:
        """Wrap a function: once its calls issue equal commands, a call is replayed as one command per node.

        Use ``@master.recorded`` or ``step = master.recorded(step)``. Only operations on tensors of nodes are
        replayed, not other Python code of the function; see ``docs/controller.md``. A call that cannot be
        replayed raises RecordingMismatch.
        """
        return Recorded(fn, self._spaces.by_index.values)

    def on_lost(self, fn: Callable[[int], Any]) -> None:
        """Call ``fn(index)`` once in another thread when a node is lost."""
        if not callable(fn):
            raise UsageError(f"on_lost expects a callable, got {fn!r}")
        self._roster.callbacks.append(fn)

    def explain(self, tensor: torch.Tensor) -> Explanation:
        """Return the operator that made a tensor, its program line and age, and the tensor's state.

        Does not wait for issued operations. If the nodes have acknowledged the tensor, they are asked,
        outside their queues, whether it is poisoned. The history keeps the last 4096 acknowledged
        operations of each node. Raises `UsageError` if the tensor is not on a node.
        """
        if type(tensor) is not RemoteTensor:
            raise UsageError(f"explain takes a tensor on a node, and this one is on {tensor.device}")
        return explain(tensor)

    def stats(self) -> list[dict[str, int]]:
        """Return counters of each node; ``docs/controller.md`` explains their names."""
        with self._lock:
            return [node.stats() for node in self._nodes]

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Return a context manager that writes the activity of master and nodes in its block to a file.

        https://ui.perfetto.dev and Chrome display it; ``docs/controller.md`` describes its content. Nodes
        that join later are not included. Entering the block raises UsageError if the file cannot be written
        or another trace is running.
        """
        with self._lock:
            spaces = [self._spaces.space(index) for index in range(len(self._nodes))]
        return Trace(path, spaces, self._lock, self.name)

    def close(self) -> None:
        """End the nodes, each after at most 5 seconds for issued operations; their tensors raise NodeLost.

        Warns about failures that were not raised, and if too many operations were new to the nodes.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        self._unpatch_modules()
        if current.opened() is self:
            current.set_master(None)
            device.uninstall_dist_send()
            restore_thread()  # other threads do so when they start a backward pass
        try:
            unseen = self._end()
        finally:
            interrupts.unprotect()
        if slow := misses_of(self._spaces.by_index.values()):
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
        for node in self._nodes:
            node.detach_in_fork(why)

    def _forked(self) -> ForkedProcess:
        return ForkedProcess(f"the nodes belong to process {self._pid}; this process is a fork of it")

    def _end(self) -> list[str]:
        """End the nodes; return the failures that were not raised."""
        for node in self._nodes:
            node.finish(CLOSE_TIMEOUT_S)
        unseen = [text for node in self._nodes for text in node.unseen()]
        for node in self._nodes:
            why = f"node {node.index} is closed: its master was closed"
            node.close(NodeLost(why, node_name(node.index), (node.index,)))
        self._roster.close()
        self._workers.close()
        return unseen

    @property
    def pids(self) -> list[int]:
        """Process ids of the nodes, each on its own machine."""
        return list(self._pids)

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        nodes = counted(len(self._nodes), "node")
        return f"<shoal.controller.Master of {nodes}{', closed' if self._closed else ''}>"
