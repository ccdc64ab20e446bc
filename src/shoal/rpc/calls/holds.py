"""The objects that a worker owns for others and holds at others, and the messages about holds.

A receiver of a reference sends ``hold`` to the owner before it uses the reference.  The sender keeps its own
reference until then: in a call until the reply, in a reply until the caller sends ``unpin``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ...common.formatting import counted, describe_error
from ...errors import CallCancelled, RpcError, ShoalError, WorkerLost
from ...future import Future, pool
from ..connection.directory import Worker
from ..connection.endpoint import Call, CallEnd
from ..connection.worker_connection import WorkerConnection
from .call import HAS_REFERENCES
from .context import current
from .objects import LEASE_S, ObjectTable, OwnedObject

if TYPE_CHECKING:
    from ..agent import Agent

#: mailbox of the messages about holds
HOLDS = 1
#: minimum number of calls with discarded futures at which they are checked for completed ones
_MIN_UNREAD_CHECKED = 256
#: attempts to send a message about a hold, when the connection is lost meanwhile
_ATTEMPTS = 3


@dataclass(slots=True, eq=False)
class ObjectHold:
    """This worker's hold of one object of another worker.

    Attributes:
        owner_holds: this worker's holds at the owner.
        count: number of references in this process.
        announced: whether ``hold`` may have been sent to the owner.
        announced_by_creation: this worker had the object created, so the owner already has it as a holder.
        announcement: the call of ``hold``, pending or completed.
        created: the call that creates the object, if it was made by this worker.
        failure_watched: whether a callback reports a failure of that call to the owner.
        failure_handled: whether that call succeeded, or its failure was reported.
    """

    owner_holds: OwnerHolds
    count: int = 0
    announced: bool = False
    announced_by_creation: bool = False
    announcement: Future[Any] | None = None
    created: Future[Any] | None = None
    failure_watched: bool = False
    failure_handled: bool = False


class OwnerHolds:
    """This worker's holds at one owner; ``lock`` keeps the messages about them in order."""

    def __init__(self, owner: Worker) -> None:
        self.owner = owner
        self.lock = threading.RLock()


class ReferenceTable:
    """The objects that one agent owns for other workers, and its holds of their objects."""

    def __init__(self, agent: Agent, release: Callable[[int], None]) -> None:
        self._agent = agent
        self._me = agent.worker.incarnation
        self.objects = ObjectTable(release)
        self._held: dict[str, ObjectHold] = {}
        #: by the incarnation of the owner
        self._by_owner: WeakValueDictionary[str, OwnerHolds] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._gone: deque[str] = deque()
        #: incarnation of a lost worker -> token of its last loss, at which its lease began
        self._losses: dict[str, object] = {}
        self._pinned: dict[tuple[int, int], Sequence[Any]] = {}
        #: calls with discarded futures: connection, call, and whether its reply is known to pin references
        self._unread: deque[tuple[WorkerConnection, Call, bool]] = deque()
        self._most_unread = _MIN_UNREAD_CHECKED
        self._pid = os.getpid()
        self._look = agent.endpoint.lasting(partial(pool.submit, self._look_at_unread))
        self._ticket = agent.endpoint.lasting(partial(pool.submit, self._flush))
        #: triggered when a call that creates an object has failed
        self._failures = agent.endpoint.lasting(partial(pool.submit, self._look_for_failures))

    def new_ident(self) -> str:
        return f"{self._me}/{next(self._numbers)}"

    def begin(self, owner: Worker, ident: str) -> tuple[OwnedObject | None, ObjectHold | None]:
        """Add a reference of this process."""
        with self.objects.lock:
            if owner.incarnation == self._me:
                return self._lease_of_creator(ident, self.objects.hold(ident, "")), None
            held = self._held.get(ident)
            if held is None:
                owner_holds = self._by_owner.get(owner.incarnation)
                if owner_holds is None:
                    owner_holds = self._by_owner[owner.incarnation] = OwnerHolds(owner)
                held = self._held[ident] = ObjectHold(owner_holds)
            held.count += 1
            return None, held

    def release_later(self, ident: str) -> None:
        """Remove a reference of this process, later; called by finalizers, so it must not block."""
        self._gone.append(ident)
        self._agent.endpoint.post.announce(self._ticket)

    def _flush(self) -> None:
        while self._gone:
            try:
                ident = self._gone.popleft()
            except IndexError:
                return
            with self.objects.lock:
                held = self._held.get(ident)
                if held is None:
                    self.objects.drop(ident, "")
                    continue
                held.count -= 1
                if held.count:
                    continue
            if self._watch_creation(ident, held):
                self._drop(ident, held)

    def track_creation(self, ident: str, held: ObjectHold | None, created: Future[Any]) -> None:
        """Watch ``created``, the call that creates an object; ``held``: None if this worker is the owner."""
        if held is None:
            created.add_done_callback(partial(self._created_here, ident))
            return
        held.created = created
        source: Any = created._source
        if source is None or source.notify_failure(self._failures):
            self._watch_creation(ident, held)

    def _look_for_failures(self) -> None:
        """Report failed calls that should have created objects, so that no worker waits for the objects."""
        with self.objects.lock:
            held = list(self._held.items())
        for ident, each in held:
            if each.created is not None and not each.failure_handled and each.created.done():
                self._watch_creation(ident, each)

    def _watch_creation(self, ident: str, held: ObjectHold) -> bool:
        """Make sure that a failure of the call that creates an object is reported to the owner.

        Returns:
            whether nothing is left to do: the call was not made here, has succeeded, or was reported.
        """
        created = held.created
        if created is None or held.failure_handled:
            return True
        if created.done() and created.exception() is None:
            held.failure_handled = True
            return True
        with self.objects.lock:
            follows, held.failure_watched = not held.failure_watched, True
        if follows:
            created.add_done_callback(partial(self._created, ident, held))
        return False

    def _created(self, ident: str, held: ObjectHold, created: Future[Any]) -> None:
        error = created.exception()
        if error is not None:
            self._cancel_creation(ident, held.owner_holds.owner, error)
        held.failure_handled = True
        self._drop(ident, held)

    def _created_here(self, ident: str, created: Future[Any]) -> None:
        if (error := created.exception()) is not None:
            self.objects.cancel_creation(ident, *_creation_error(error))

    def _cancel_creation(self, ident: str, owner: Worker, error: BaseException) -> None:
        """Send ``cancel_creation`` to the owner, since the call that creates an object has failed."""
        for _ in range(_ATTEMPTS):
            try:
                self._agent.call_owner(owner, cancel_creation, ident, *_creation_error(error)).wait()
                return
            except WorkerLost:
                continue  # if only the connection broke, try again with the next one
            except ShoalError:
                return

    def _drop(self, ident: str, held: ObjectHold) -> None:
        """Remove the hold and send ``drop`` to the owner, unless this process has references again."""
        with held.owner_holds.lock:
            with self.objects.lock:
                if held.count or self._held.get(ident) is not held:
                    return
                del self._held[ident]
            if held.announced:
                with contextlib.suppress(ShoalError):  # if the owner is lost, so is the object
                    self._agent.post_to_owner(held.owner_holds.owner, drop, ident, self._me)

    def confirm(self, ident: str, held: ObjectHold) -> None:
        """Send ``hold`` to the owner and wait for the reply, unless the owner already knows of the hold."""
        owner_holds = held.owner_holds
        for _ in range(_ATTEMPTS):
            with owner_holds.lock:
                if held.announced_by_creation:
                    return
                announcement = held.announcement
                if announcement is None:
                    held.announced = True
                    announcement = self._agent.call_owner(owner_holds.owner, hold, ident, self._me)
                    held.announcement = announcement
            try:
                announcement.wait()
                return
            except BaseException as error:
                if held.announcement is announcement:
                    held.announcement = None
                if not isinstance(error, WorkerLost):
                    raise
        # The owner has failed; uses of the reference will raise.

    def describe_held(self) -> list[str]:
        """Describe the holds of this worker, and the references that it keeps for replies in flight."""
        with self.objects.lock:
            held = [(ident, each.owner_holds.owner.name, each.count) for ident, each in self._held.items()]
            pinned = sum(map(len, self._pinned.values()))
        found = [f"holds {counted(n, 'reference')} to {ident} of {owner!r}" for ident, owner, n in held]
        if pinned:
            found.append(f"keeps {counted(pinned, 'reference')} until the receivers hold them")
        return found

    def lost(self, worker: Worker) -> None:
        """Handle the end of a connection to or from ``worker``."""
        self._begin_lease(worker.incarnation)
        if (owner_holds := self._by_owner.get(worker.incarnation)) is not None:
            pool.submit(partial(self._send_holds, owner_holds))

    def _send_holds(self, owner_holds: OwnerHolds) -> None:
        """Send the holds of this worker to an owner over a new connection."""
        owner = owner_holds.owner
        with owner_holds.lock, contextlib.suppress(ShoalError):  # if the owner is lost, so are its objects
            self._agent.connection(owner.name, self._agent.timeout, owner)
            with self.objects.lock:
                held = [(ident, each) for ident, each in self._held.items() if each.announced]
            idents = [ident for ident, each in held if each.owner_holds is owner_holds]
            self._agent.post_to_owner(owner, replace_holds, self._me, idents)

    def _begin_lease(self, holder: str) -> None:
        """Remove the holds of ``holder`` after :data:`LEASE_S` seconds unless it is connected then."""
        self._losses[holder] = loss = object()
        self._agent.endpoint.after(LEASE_S, partial(self._end_lease, holder, loss))

    def _end_lease(self, holder: str, loss: object) -> None:
        if self._losses.get(holder) is not loss:
            return  # it was lost again since: the newer lease applies
        del self._losses[holder]
        if not self._agent.connections.is_connected(holder):
            self.objects.forget(holder)

    def make(self, ident: str, holder: str, made: str, connection: int) -> OwnedObject:
        """Begin to create an object for a call on ``connection``; see :meth:`ObjectTable.begin`."""
        owned = self.objects.begin(ident, holder, made, connection)
        if holder:
            self.check_connected(holder, connection)
        return owned

    def hold(self, ident: str, holder: str, connection: int) -> None:
        """Add a holder, whose ``hold`` arrived on ``connection``."""
        self._lease_of_creator(ident, self.objects.hold(ident, holder, connection))
        self.check_connected(holder, connection)

    def check_connected(self, holder: str, connection: int) -> None:
        """Begin a lease of ``holder`` if ``connection``, on which it sent a hold, has already ended."""
        if self._agent.connections.ended(connection):
            self._begin_lease(holder)

    def _lease_of_creator(self, ident: str, owned: OwnedObject) -> OwnedObject:
        """Return ``owned``; begin a lease of its creator if that is lost and did not create it yet."""
        maker = ident.partition("/")[0]
        created = owned.begun or owned.value.done() or maker == self._me
        if not created and not self._agent.connections.is_connected(maker):
            self._begin_lease(maker)
        return owned

    # -- references in flight ------------------------------------------------------------------

    def pin_reply(self, connection: int, call: int, refs: Sequence[Any]) -> None:
        """Keep references that were sent in a reply until the caller sends ``unpin``."""
        self._pinned[connection, call] = refs

    def unpin(self, connection: int, call: int) -> None:
        self._pinned.pop((connection, call), None)

    def unread(self, connection: WorkerConnection, call: Call) -> None:
        """Send ``unpin``, later, if the reply to ``call``, whose future was discarded, contains references.

        Called by finalizers, so it must not block.
        """
        if connection.restricted or connection.ended or self._pid != os.getpid():
            return
        ended = call.announce_failure(self._look, HAS_REFERENCES)
        if ended and not _may_pin(call):
            return
        self._unread.append((connection, call, ended))
        if ended or len(self._unread) > self._most_unread:
            self._agent.endpoint.post.announce(self._look)

    def _look_at_unread(self) -> None:
        pinned: dict[WorkerConnection, list[int]] = {}
        for _ in range(len(self._unread)):
            try:
                connection, call, pins = self._unread.popleft()
            except IndexError:
                break
            if not (pins or call.done()):
                self._unread.append((connection, call, False))
            elif pins or _may_pin(call):
                pinned.setdefault(connection, []).append(call.number)
        self._most_unread = 2 * len(self._unread) + _MIN_UNREAD_CHECKED
        for connection, numbers in pinned.items():
            self._agent.acknowledge(connection, *numbers)

    def unpin_all_of(self, connection: int) -> None:
        for key in [key for key in list(self._pinned) if key[0] == connection]:
            self._pinned.pop(key, None)


def hold(ident: str, holder: str) -> None:
    """Message: ``holder`` has received a reference."""
    served = current()
    served.agent.references.hold(ident, holder, served.peer)


def _creation_error(error: BaseException) -> tuple[type[RpcError], str]:
    """Return class and text of the error for uses of an object whose creation failed with ``error``."""
    kind = CallCancelled if isinstance(error, CallCancelled) else RpcError
    return kind, str(error) if isinstance(error, ShoalError) else describe_error(error)


def cancel_creation(ident: str, kind: type[RpcError], why: str) -> None:
    """Message: the call that should have created the object has failed."""
    current().agent.references.objects.cancel_creation(ident, kind, why)


def drop(ident: str, holder: str) -> None:
    """Message: ``holder`` has released its last reference."""
    current().agent.references.objects.drop(ident, holder)


def replace_holds(holder: str, held: list[str]) -> None:
    """Message: ``holder`` has reconnected and still has the holds ``held``."""
    served = current()
    served.agent.references.objects.replace_holds(holder, held, served.peer)
    served.agent.references.check_connected(holder, served.peer)


def _may_pin(call: Call) -> bool:
    """Whether the callee may keep references for a call that has ended and whose reply was not taken."""
    failed = call.error()
    if failed is None:
        return bool(call.reply().flags & HAS_REFERENCES) if call.number else False
    return failed.end in (CallEnd.CANCELLED, CallEnd.TIMEOUT)  # its reply may have been on its way


def unpin(*numbers: int) -> None:
    """Message: the caller holds the references in the replies to these calls, or has discarded them."""
    served = current()
    for number in numbers:
        served.agent.references.unpin(served.peer, number)
