"""The agent of a worker: serves calls of other workers and makes calls to them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ..common.arguments import checked_seconds
from ..common.copy_refusal import refuses_copies
from ..common.formatting import format_seconds
from ..common.process_identity import ProcessIdentity
from ..errors import (
    AgentClosed,
    CallTimeout,
    ForkedProcess,
    ShoalError,
    UnknownWorker,
    UsageError,
    WorkerLost,
)
from ..future import Future, pool
from ..future.pool import STALL_TIMEOUT_S
from ..net import Deadline
from ..store import Store
from .calls import call
from .calls.context import call_timeout, served_by
from .calls.holds import HOLDS, ReferenceTable, unpin
from .calls.serving import Service
from .codec.devices import EventWatcher
from .connection.device_maps import DeviceMaps, checked
from .connection.directory import Directory, Worker, incarnation, is_name
from .connection.endpoint import Endpoint, Message
from .connection.manager import ConnectionManager
from .connection.meeting import Barriers, WorkerMeeting
from .connection.worker_connection import WorkerConnection
from .peer import Peer
from .recorder import CallRecorder

_logger = logging.getLogger("shoal")
#: prefix of the keys of the directory; part of the identity that both ends of a connection compare
_NAMESPACE = "workers"
#: seconds for closing each open agent when the process exits
_EXIT_TIMEOUT_S = 5.0
#: seconds for handlers to end after a close that is not graceful
_UNGRACEFUL_TIMEOUT_S = 0.5
#: seconds between two polls for the completion of all calls
_POLL_INTERVAL_S = 0.005


@refuses_copies(
    "an Agent",
    "connections and threads",
    "Keep it outside of the object that you copy; another process makes its own with shoal.rpc.join()",
)
class Agent:
    """One worker; returned by :func:`join`.  As a context manager it closes itself at the end of the block.

    Attributes:
        name: of the worker.
        timeout: default timeout of calls, in seconds.
        job, epoch, store, secret, interface: of the rendezvous that has the directory of workers.
        recorder: lists the pending calls and the calls being served.
    """

    def __init__(
        self,
        name: str,
        job: str,
        epoch: int,
        identity: ProcessIdentity,
        host: str,
        store: Store,
        *,
        secret: bytes,
        interface: str,
        rank: int,
        timeout: float,
        memory: int,
        handlers: int,
        heartbeat: float,
        serve: Mapping[str, Callable[..., Any]] | None,
        device_maps: DeviceMaps | None,
        release: Callable[[float], None],
        meeting: WorkerMeeting | None = None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.job, self.epoch, self.store = job, epoch, store
        self.secret, self.interface = secret, interface
        self._release = release
        #: the workers that close together; None: this one closes independently
        self._meeting = meeting
        self._closing = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._on_lost: list[Callable[[str], Any]] = []
        self._on_connection_lost: list[Callable[[str], Any]] = []
        #: notified when a connection has ended, and when the agent is closed
        self._connection_ended = threading.Condition()
        self.directory = Directory(store, _NAMESPACE)
        maps = checked(device_maps, name)
        self.endpoint = Endpoint(name, memory, heartbeat)
        self.watch = EventWatcher(self.endpoint)
        try:
            self.connections = ConnectionManager(
                self, f"{job}/{epoch}/{_NAMESPACE}", serve is not None, maps, self._connection_lost
            )
        except BaseException:
            self.endpoint.close(0.0)
            raise
        self.worker = Worker(
            machine=identity.machine, process=identity.process, name=name, incarnation=incarnation(),
            rank=rank, host=host, unix=self.connections.unix, address=interface, port=self.connections.port,
        )  # fmt: skip
        self._barriers = Barriers(self.worker, self.directory, store, _NAMESPACE)
        self.service = Service(self, serve, handlers)
        self.recorder = CallRecorder(self, job)
        self.executor = self.service.executor
        self.references: ReferenceTable = ReferenceTable(self, self.executor.release)
        try:
            self.executor.start()
            self.executor.start_mailbox(HOLDS)
            self.endpoint.watch(STALL_TIMEOUT_S, self.executor.add_thread)
            self.connections.start(self.worker)
            self.directory.claim(self.worker)
        except BaseException:
            self.connections.close()
            self.endpoint.close(0.0)
            self.executor.close(1.0)
            raise
        _open.add(self)

    # -- other workers -------------------------------------------------------------------------

    def peer(self, worker: str | int, timeout: float | None = None) -> Peer:
        """Return the worker with a name or rank, which may be this one; wait until it has joined.

        Args:
            worker: its name, or its rank in the job.
            timeout: seconds to wait for it, also for a replacement if its process has ended; None: the
                timeout of calls, without waiting for a replacement; 0: do not wait.

        Raises:
            UnknownWorker: it did not join in time; the message lists the workers that did.
            WorkerLost: its process has ended, and ``timeout`` is None.
        """
        self._check_open()
        deadline = Deadline(self.timeout if timeout is None else timeout)
        if isinstance(worker, bool) or not (isinstance(worker, int) or is_name(worker)):
            raise UsageError(f"worker {self.name!r}: {worker!r} is neither the name nor the rank of a worker")
        name = worker
        if isinstance(name, int):
            name = self.directory.name_of_rank(name, deadline, self.name)
        connection = self.connections.existing(name)
        if name == self.name:
            found = self.worker
        elif connection is not None:
            found = connection.worker
        else:
            waits = timeout is not None
            found = self.directory.find(name, deadline, self.name, wait_for_replacement=waits)
        return Peer(self, name, self.timeout, found.rank)

    def peers(self) -> list[Peer]:
        """Return all other workers that have joined and are not known to have ended, sorted by name."""
        self._check_open()
        there = sorted((worker.name, worker.rank) for worker in self.directory.workers())
        return [Peer(self, name, self.timeout, rank) for name, rank in there if name != self.name]

    def barrier(self, names: Iterable[str] | None = None, timeout: float | None = None) -> None:
        """Wait until each of these workers has called ``barrier`` as many times as this worker.

        Args:
            names: the participants, the same at each of them, including this worker; None: all workers that
                have joined.
            timeout: seconds; None: the timeout of calls.

        Raises:
            WorkerLost: the process of one of them has ended.
            UnknownWorker: one did not reach the barrier in time.
        """
        self._check_open()
        seconds = self.timeout if timeout is None else checked_seconds("timeout", timeout)
        self._barriers.wait(names, Deadline(seconds))

    def wait(self, until: str | None = None) -> None:
        """Block until a worker has left or failed; serve calls meanwhile.  A broken connection is restored.

        Args:
            until: its name; None: block until this agent is closed, by one of its handlers or another thread.

        Raises:
            UnknownWorker: no worker joins as ``until`` within the timeout of calls.
        """
        if until is not None:
            with contextlib.suppress(WorkerLost):  # it has already ended
                self.peer(until)
        awaited = None
        while not self._closed:
            connection = None
            if until is not None:
                try:
                    connection = self.connection(until, self.timeout, awaited)
                except CallTimeout:
                    continue  # it may still run
                except (AgentClosed, UnknownWorker, WorkerLost):
                    return
                awaited = connection.worker
            with self._connection_ended:
                while not self._closed and not (connection is not None and connection.ended):
                    self._connection_ended.wait()

    def on_lost(self, fn: Callable[[str], Any]) -> None:
        """Call ``fn(name)`` when the last connection to or from a worker has ended, for any reason."""
        if not callable(fn):
            raise UsageError(f"worker {self.name!r}: {fn!r} cannot be called when a worker is lost")
        self._on_lost.append(fn)

    def on_connection_lost(self, fn: Callable[[str], Any]) -> None:
        """Call ``fn(name)`` whenever a connection to or from a worker has ended; two workers may have two."""
        self._on_connection_lost.append(fn)

    def stats(self) -> dict[str, int]:
        """Return counts of peers, calls, messages, bytes and threads; ``docs/rpc.md`` explains each one."""
        return {**self.endpoint.post.stats(), "threads": self.executor.thread_count()}

    def dump(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write a file with the pending calls, the calls being served, and the stack of every thread.

        May be called from any thread and from a signal handler.  ``shoal dumps`` displays such files.

        Args:
            path: a file or a directory; None: ``SHOAL_DUMP_DIR``, or the working directory.
        """
        return self.recorder.write(path)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has begun."""
        return self._closed

    def leaks(self) -> list[str]:
        """Describe each object that this worker owns: the call that created it, and its holders."""
        names = {worker.incarnation: worker.name for worker in self.directory.workers()}
        return [
            f"{owned.made}: held by "
            + (", ".join(repr(names.get(each, each)) for each in owned.holders) or "nobody else")
            for owned in self.references.objects.held().values()
        ]

    # -- closing -------------------------------------------------------------------------------

    def close(self, timeout: float = 30.0, *, graceful: bool = True) -> None:
        """Leave: remove the name from the directory, close all connections, and end all threads.

        Args:
            timeout: seconds in total.
            graceful: first finish the calls that are served and queued, and wait for this worker's own calls.
                Calls that arrive meanwhile and have not begun by then raise AgentClosed.  An agent of a
                group (``join(group=)``) serves until the agents of all ranks are being closed, and no call
                is pending or served at any of them.

        Calls that are still pending after ``timeout`` fail with AgentClosed here and WorkerLost at the peer.

        Raises:
            WorkerLost, UnknownWorker: another agent of the group has failed, or was not closed in time.
                This one is closed nevertheless.
            CallTimeout: a worker did not receive all that was queued for it (a warning is logged instead if
                not ``graceful``).  This one is closed nevertheless.
        """
        deadline = Deadline(checked_seconds("timeout", timeout))
        try:
            if self._pid == os.getpid():
                with self._closing:
                    meeting, self._meeting = self._meeting, None
                if meeting is not None:
                    meeting.leave(self, deadline, graceful)
        except BaseException:
            graceful = False
            raise
        finally:
            self._close(deadline, graceful)

    def _close(self, deadline: Deadline, graceful: bool) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with self._connection_ended:
            self._connection_ended.notify_all()
        _open.discard(self)
        if self._pid != os.getpid():
            return
        with contextlib.ExitStack() as steps:  # runs in reverse order
            steps.callback(lambda: self._release(max(deadline.remaining(), 0.5)))
            # By now the calls of the remaining handlers are cancelled, and handlers that only wait end.
            linger = math.inf if graceful else _UNGRACEFUL_TIMEOUT_S
            steps.callback(lambda: self.executor.close(min(max(deadline.remaining(), 0.5), linger)))
            steps.callback(self.watch.close)
            steps.callback(self._close_endpoint, deadline, graceful)
            steps.callback(self.connections.close)
            if graceful:
                steps.callback(self._finish_calls, deadline)
            steps.callback(self.directory.withdraw, self.worker)

    def _finish_calls(self, deadline: Deadline) -> None:
        """Finish the calls that are served and queued now, and this worker's own; serve new ones meanwhile.

        Then finish only the running handlers and refuse calls that have not begun.  Otherwise callers that
        keep calling would delay the close until its timeout.
        """
        post, service = self.endpoint.post, self.service
        mine = served_by(self)  # a handler that closes its agent does not wait for itself

        def served(begun: bool) -> set[tuple[int, int]]:
            calls = [(peer, call) for peer, call, _, at in post.handled() if not begun or at is not None]
            return set(calls) - {mine}

        def made() -> set[tuple[int, int]]:
            return {(peer, call) for peer, call, *_ in post.pending()}

        def wait_while(unfinished: Callable[[], object]) -> None:
            while unfinished() and not deadline.expired:
                time.sleep(_POLL_INTERVAL_S)

        def handle(message: Message) -> None:
            service.handle(message)
            finished.append(message.call)

        def queued() -> int:
            return post.stats()["letters"]  # includes posts, which are counted nowhere else

        finished: list[int] = []
        self.executor.handle = handle
        count, there, own = queued(), served(begun=False), made()
        wait_while(
            lambda: there & served(begun=False) or own & made() or (len(finished) < count and queued())
        )
        self.executor.handle = service.refuse
        running = served(begun=True)
        wait_while(lambda: running & served(begun=True))

    def _close_endpoint(self, deadline: Deadline, graceful: bool) -> None:
        """Close the endpoint; report the workers that it could not send everything to."""
        late = self.endpoint.close(max(deadline.remaining(), 0.5))
        if not late:
            return
        names = set()
        for number in late:
            with contextlib.suppress(KeyError):  # lost, and forgotten
                names.add(self.connections.by_number(number).worker.name)
        text = (
            f"worker {self.name!r}: {', '.join(map(repr, sorted(names)))} did not take all that was queued "
            f"within the {format_seconds(deadline.timeout)} of close(): calls and posts that were not sent "
            "are lost.  Close with a longer timeout, or wait for the result of a later call"
        )
        if graceful:
            raise CallTimeout(text)
        _logger.warning("%s", text)

    def wait_until_idle(self, deadline: Deadline) -> int | None:
        """Wait until no call is pending, served or queued.

        Returns:
            number of calls that this worker has made; None: timed out.
        """
        mine = served_by(self) is not None  # a handler that calls this does not wait for itself
        while True:
            stats = self.endpoint.post.stats()
            if not (stats["calls"] or stats["letters"] or stats["handled"] > mine):
                return stats["made"]
            if deadline.expired:
                return None
            time.sleep(_POLL_INTERVAL_S)

    def check_reachable(self, name: str, timeout: float) -> None:
        """Raise WorkerLost if a worker cannot be connected to; a timeout is not an error."""
        with contextlib.suppress(CallTimeout):
            self.connection(name, timeout)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=error is None)

    def __repr__(self) -> str:
        return f"<shoal.rpc.Agent {self.name!r}{', closed' if self._closed else ''}>"

    # -- for peers -----------------------------------------------------------------------------

    def connection(self, name: str, timeout: float, owner: Worker | None = None) -> WorkerConnection:
        """Return the connection for calls to ``name``; with ``owner``, only to this incarnation."""
        self._check_open()
        connection = self.connections.existing(name)
        if connection is None:
            seconds = self.timeout if timeout == math.inf else timeout
            connection = self.connections.connect_to(name, self.directory, min(seconds, 1e9), owner)
        self.connections.check_incarnation(connection.worker, owner)
        return connection

    def alive(self, name: str) -> bool:
        """Whether ``name`` is connected, or in the directory and not known to have ended."""
        return self.connections.existing(name) is not None or any(
            worker.name == name for worker in self.directory.workers()
        )

    def peer_of(self, owner: Worker, timeout: float | None = None) -> Peer:
        """Return the owner of an object as a peer."""
        return Peer(self, owner.name, call_timeout(timeout, self.timeout), owner.rank)

    def call_owner(self, owner: Worker, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``fn`` at an owner, in order with the other messages about holds."""
        return Peer(self, owner.name, self.timeout)._call(HOLDS, fn, args, {}, owner=owner)

    def post_to_owner(self, owner: Worker, fn: Callable[..., Any], *args: Any) -> None:
        """Like :meth:`call_owner`, without a reply."""
        connection = self.connection(owner.name, self.timeout, owner)
        call.post(connection, HOLDS, fn, args, {}, self.timeout, f"worker {self.name!r}")

    def acknowledge(self, connection: WorkerConnection, *numbers: int) -> None:
        """Notify the callee that the references in these replies are held, or were discarded."""
        with contextlib.suppress(ShoalError):
            call.post(connection, HOLDS, unpin, numbers, {}, self.timeout, f"worker {self.name!r}")

    # -- inside --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ForkedProcess(f"worker {self.name!r}: its agent belongs to the process that was forked")
        if self._closed:
            raise AgentClosed(f"worker {self.name!r}: the agent is closed")

    def _connection_lost(self, connection: WorkerConnection, is_last: bool) -> None:
        self.references.unpin_all_of(connection.number)
        with self._connection_ended:
            self._connection_ended.notify_all()
        if not self._closed:
            self.references.lost(connection.worker)
        for fn in self._on_connection_lost + (self._on_lost if is_last else []):
            pool.submit(partial(fn, connection.worker.name))


#: the agents of this process that are not closed
_open: weakref.WeakSet[Agent] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for agent in list(_open):
        with contextlib.suppress(Exception, ShoalError):
            agent.close(_EXIT_TIMEOUT_S, graceful=False)
