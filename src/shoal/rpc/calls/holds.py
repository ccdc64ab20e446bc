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
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ...common.formatting import counted, describe_error
from ...errors import CallCancelled, RpcError, ShoalError, WorkerLost
from ...future import Future, pool
from ..connection.directory import Worker
from ..connection.line import WorkerConnection
from ..connection.post import Call, CallEnd
from .call import PINS
from .current import current
from .leases import LEASE_S, Ledger, Owned

#: mailbox of the messages about holds
HOLDS = 1
#: minimum number of calls with discarded futures at which they are checked for completed ones
_MIN_UNREAD_CHECKED = 256
#: attempts to send a message about a hold, when the connection is lost meanwhile
_ATTEMPTS = 3


class ObjectHold:
    """This worker's hold of one object of another worker.

    Attributes:
        account: this worker's holds at the owner.
        objects: number of references in this process.
        told: whether ``hold`` may have been sent to the owner.
        asked: the call of ``hold``, pending or completed.
        mine: this worker had the object created, so the owner already has it as a holder.
        created: the call that creates the object, if it was made by this worker.
        followed: whether a callback reports a failure of that call to the owner.
        settled: whether that call succeeded, or its failure was reported.
    """

    __slots__ = ("account", "asked", "created", "followed", "mine", "objects", "settled", "told")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.objects = 0
        self.told = self.mine = self.followed = self.settled = False
        self.asked: Future[Any] | None = None
        self.created: Future[Any] | None = None


class Account:
    """This worker's holds at one owner; ``lock`` keeps the messages about them in order."""

    def __init__(self, owner: Worker) -> None:
        self.owner = owner
        self.lock = threading.RLock()


class References:
    """The objects that one agent owns for other workers, and its holds of their objects."""

    def __init__(self, agent: Any, release: Callable[[int], None]) -> None:
        self._agent = agent
        self.ledger = Ledger(release)
        self._held: dict[str, ObjectHold] = {}
        #: by the incarnation of the owner
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
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
        return f"{self._agent.worker.incarnation}/{next(self._numbers)}"

    def begin(self, owner: Worker, ident: str) -> tuple[Owned | None, ObjectHold | None]:
        """Add a reference of this process."""
        with self.ledger.lock:
            if owner.incarnation == self._agent.worker.incarnation:
                return self._awaiting_maker(ident, self.ledger.hold(ident, "")), None
            held = self._held.get(ident)
            if held is None:
                account = self._accounts.get(owner.incarnation)
                if account is None:
                    account = self._accounts[owner.incarnation] = Account(owner)
                held = self._held[ident] = ObjectHold(account)
            held.objects += 1
            return None, held

    def gone(self, ident: str) -> None:
        """Remove a reference of this process, later; called by finalizers, so it must not block."""
        self._gone.append(ident)
        self._agent.endpoint.post.announce(self._ticket)

    def _flush(self) -> None:
        while self._gone:
            try:
                ident = self._gone.popleft()
            except IndexError:
                return
            with self.ledger.lock:
                held = self._held.get(ident)
                if held is None:
                    self.ledger.drop(ident, "")
                    continue
                held.objects -= 1
                if held.objects:
                    continue
            if self._follow(ident, held):
                self._give_back(ident, held)

    def making(self, ident: str, held: ObjectHold | None, created: Future[Any]) -> None:
        """Watch ``created``, the call that creates an object; ``held``: None if this worker is the owner."""
        if held is None:
            created.add_done_callback(partial(self._made_here, ident))
            return
        held.created = created
        source: Any = created._source
        if source is None or source.notify_failure(self._failures):
            self._follow(ident, held)

    def _look_for_failures(self) -> None:
        """Report failed calls that should have created objects, so that no worker waits for the objects."""
        with self.ledger.lock:
            held = list(self._held.items())
        for ident, each in held:
            if each.created is not None and not each.settled and each.created.done():
                self._follow(ident, each)

    def _follow(self, ident: str, held: ObjectHold) -> bool:
        """Make sure that a failure of the call that creates an object is reported to the owner.

        Returns:
            whether nothing is left to do: the call was not made here, has succeeded, or was reported.
        """
        created = held.created
        if created is None or held.settled:
            return True
        if created.done() and created.exception() is None:
            held.settled = True
            return True
        with self.ledger.lock:
            follows, held.followed = not held.followed, True
        if follows:
            created.add_done_callback(partial(self._created, ident, held))
        return False

    def _created(self, ident: str, held: ObjectHold, created: Future[Any]) -> None:
        error = created.exception()
        if error is not None:
            self._call_off(ident, held.account.owner, error)
        held.settled = True
        self._give_back(ident, held)

    def _made_here(self, ident: str, created: Future[Any]) -> None:
        if (error := created.exception()) is not None:
            self.ledger.call_off(ident, *_told(error))

    def _call_off(self, ident: str, owner: Worker, error: BaseException) -> None:
        """Send ``call_off`` to the owner, since the call that creates an object has failed."""
        for _ in range(_ATTEMPTS):
            try:
                self._agent.ask(owner, call_off, ident, *_told(error)).wait()
                return
            except WorkerLost:
                continue  # if only the connection broke, try again with the next one
            except ShoalError:
                return

    def _give_back(self, ident: str, held: ObjectHold) -> None:
        """Remove the hold and send ``drop`` to the owner, unless this process has references again."""
        with held.account.lock:
            with self.ledger.lock:
                if held.objects or self._held.get(ident) is not held:
                    return
                del self._held[ident]
            if held.told:
                with contextlib.suppress(ShoalError):  # if the owner is lost, so is the object
                    self._agent.tell(held.account.owner, drop, ident, self._agent.worker.incarnation)

    def confirm(self, ident: str, held: ObjectHold) -> None:
        """Send ``hold`` to the owner and wait for the reply, unless the owner already knows of the hold."""
        account = held.account
        for _ in range(_ATTEMPTS):
            with account.lock:
                if held.mine:
                    return
                asked = held.asked
                if asked is None:
                    held.told, me = True, self._agent.worker.incarnation
                    asked = held.asked = self._agent.ask(account.owner, hold, ident, me)
            try:
                asked.wait()
                return
            except BaseException as error:
                if held.asked is asked:
                    held.asked = None
                if not isinstance(error, WorkerLost):
                    raise
        # The owner has failed; uses of the reference will raise.

    def standing(self) -> list[str]:
        """Describe the holds of this worker, and the references that it keeps for replies in flight."""
        with self.ledger.lock:
            held = [(ident, each.account.owner.name, each.objects) for ident, each in self._held.items()]
            pinned = sum(map(len, self._pinned.values()))
        found = [f"holds {counted(n, 'reference')} to {ident} of {owner!r}" for ident, owner, n in held]
        if pinned:
            found.append(f"keeps {counted(pinned, 'reference')} until the receivers hold them")
        return found

    def lost(self, worker: Worker) -> None:
        """Handle the end of a connection to or from ``worker``."""
        self._begin_lease(worker.incarnation)
        if (account := self._accounts.get(worker.incarnation)) is not None:
            pool.submit(partial(self._resume, account))

    def _resume(self, account: Account) -> None:
        """Send the holds of this worker to an owner over a new connection."""
        owner, me = account.owner, self._agent.worker.incarnation
        with account.lock, contextlib.suppress(ShoalError):  # if the owner is lost, so are its objects
            self._agent.line(owner.name, self._agent.timeout, owner)
            with self.ledger.lock:
                mine = [i for i, held in self._held.items() if held.account is account and held.told]
            self._agent.tell(owner, resume, me, mine)

    def _begin_lease(self, holder: str) -> None:
        """Remove the holds of ``holder`` after :data:`LEASE_S` seconds unless it is connected then."""
        self._losses[holder] = loss = object()
        self._agent.endpoint.after(LEASE_S, partial(self._end_lease, holder, loss))

    def _end_lease(self, holder: str, loss: object) -> None:
        if self._losses.get(holder) is not loss:
            return  # it was lost again since: the newer lease applies
        del self._losses[holder]
        if not self._agent.links.connected(holder):
            self.ledger.forget(holder)

    def make(self, ident: str, holder: str, made: str, line: int) -> Owned:
        """Begin to create an object for a call that arrived on ``line``; see :meth:`Ledger.begin`."""
        owned = self.ledger.begin(ident, holder, made, line)
        if holder:
            self.heard(holder, line)
        return owned

    def hold(self, ident: str, holder: str, line: int) -> None:
        """Add a holder, whose ``hold`` arrived on ``line``."""
        self._awaiting_maker(ident, self.ledger.hold(ident, holder, line))
        self.heard(holder, line)

    def heard(self, holder: str, line: int) -> None:
        """Begin a lease of ``holder`` if ``line``, on which it sent a hold, has already ended."""
        if self._agent.links.ended(line):
            self._begin_lease(holder)

    def _awaiting_maker(self, ident: str, owned: Owned) -> Owned:
        """Return ``owned``; begin a lease of its creator if that is lost and did not create it yet."""
        maker, me = ident.partition("/")[0], self._agent.worker.incarnation
        if not (owned.begun or owned.value.done() or maker == me or self._agent.links.connected(maker)):
            self._begin_lease(maker)
        return owned

    # -- references in flight ------------------------------------------------------------------

    def pin_reply(self, line: int, call: int, refs: Sequence[Any]) -> None:
        """Keep references that were sent in a reply until the caller sends ``unpin``."""
        self._pinned[line, call] = refs

    def unpin(self, line: int, call: int) -> None:
        self._pinned.pop((line, call), None)

    def unread(self, line: WorkerConnection, call: Call) -> None:
        """Send ``unpin``, later, if the reply to ``call``, whose future was discarded, contains references.

        Called by finalizers, so it must not block.
        """
        if line.plain or line.ended or self._pid != os.getpid():
            return
        ended = call.announce_failure(self._look, PINS)
        if ended and not _may_pin(call):
            return
        self._unread.append((line, call, ended))
        if ended or len(self._unread) > self._most_unread:
            self._agent.endpoint.post.announce(self._look)

    def _look_at_unread(self) -> None:
        pinned: dict[WorkerConnection, list[int]] = {}
        for _ in range(len(self._unread)):
            try:
                line, call, pins = self._unread.popleft()
            except IndexError:
                break
            if not (pins or call.done()):
                self._unread.append((line, call, False))
            elif pins or _may_pin(call):
                pinned.setdefault(line, []).append(call.number)
        self._most_unread = 2 * len(self._unread) + _MIN_UNREAD_CHECKED
        for line, numbers in pinned.items():
            self._agent.acknowledge(line, *numbers)

    def unpin_line(self, line: int) -> None:
        for key in [key for key in list(self._pinned) if key[0] == line]:
            self._pinned.pop(key, None)


def hold(ident: str, holder: str) -> None:
    """Message: ``holder`` has received a reference."""
    served = current()
    served.agent.references.hold(ident, holder, served.peer)


def _told(error: BaseException) -> tuple[type[RpcError], str]:
    """Return class and text of the error for uses of an object whose creation failed with ``error``."""
    kind = CallCancelled if isinstance(error, CallCancelled) else RpcError
    return kind, str(error) if isinstance(error, ShoalError) else describe_error(error)


def call_off(ident: str, kind: type[RpcError], why: str) -> None:
    """Message: the call that should have created the object has failed."""
    current().agent.references.ledger.call_off(ident, kind, why)


def drop(ident: str, holder: str) -> None:
    """Message: ``holder`` has released its last reference."""
    current().agent.references.ledger.drop(ident, holder)


def resume(holder: str, held: list[str]) -> None:
    """Message: ``holder`` has reconnected and still has the holds ``held``."""
    served = current()
    served.agent.references.ledger.resume(holder, held, served.peer)
    served.agent.references.heard(holder, served.peer)


def _may_pin(call: Call) -> bool:
    """Whether the callee may keep references for a call that has ended and whose reply was not taken."""
    failed = call.error()
    if failed is None:
        return bool(call.reply().flags & PINS) if call.number else False
    return failed.end in (CallEnd.CANCELLED, CallEnd.TIMEOUT)  # its reply may have been on its way


def unpin(*numbers: int) -> None:
    """Message: the caller holds the references in the replies to these calls, or has discarded them."""
    served = current()
    for number in numbers:
        served.agent.references.unpin(served.peer, number)
