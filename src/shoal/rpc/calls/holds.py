"""The objects that this worker owns for others and holds of theirs, and the messages about them.

A holder tells the owner of its hold before it uses a reference that it was sent, and the sender keeps its own
until then: until a call has its reply, or until the caller says that what came in a reply is held.
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

from ...common.wording import counted, in_words
from ...errors import CallCancelled, RpcError, ShoalError, WorkerLost
from ...future import Future, pool
from ..connection.directory import Worker
from ..connection.line import WorkerConnection
from ..connection.post import Call, CallEnd
from .call import PINS
from .current import current
from .leases import LEASE, Ledger, Owned

#: mailbox of what workers tell one another of their holds
HOLDS = 1
#: so many calls whose futures are gone may wait to be looked at; more are looked through for ended ones
_FEW = 256
#: how often an owner is told of a hold whose connection is cut meanwhile
_ATTEMPTS = 3


class ObjectHold:
    """This worker's hold of one object of another.

    Attributes:
        account: with the owner.
        objects: references in this process.
        told: whether the owner may know of this hold.
        asked: the call that tells it, or has told it.
        mine: this worker has asked for the object, and needs tell nothing more.
        created: the call that makes the object, if this worker made it.
        followed: whether the owner will be told if that call fails.
        settled: whether the owner was told of its failure, or need not be.
    """

    __slots__ = ("account", "asked", "created", "followed", "mine", "objects", "settled", "told")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.objects = 0
        self.told = self.mine = self.followed = self.settled = False
        self.asked: Future[Any] | None = None
        self.created: Future[Any] | None = None


class Account:
    """This worker's holds at one owner, which is told of them in an order that ``lock`` keeps."""

    def __init__(self, owner: Worker) -> None:
        self.owner = owner
        self.lock = threading.RLock()


class References:
    """The objects that one agent owns for others, and those that it holds of theirs."""

    def __init__(self, agent: Any, release: Callable[[int], None]) -> None:
        self._agent = agent
        self.ledger = Ledger(release)
        self._held: dict[str, ObjectHold] = {}
        #: of owners of whom this worker holds something
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._gone: deque[str] = deque()
        #: of each worker that was lost, the last loss, from which its lease runs
        self._losses: dict[str, object] = {}
        self._pinned: dict[tuple[int, int], Sequence[Any]] = {}
        #: calls whose futures nobody has any more, their connections, and whether their replies are known to
        #: pin references; and how many there may be
        self._unread: deque[tuple[WorkerConnection, Call, bool]] = deque()
        self._most_unread = _FEW
        self._pid = os.getpid()
        self._look = agent.endpoint.lasting(partial(pool.submit, self._look_at_unread))
        self._ticket = agent.endpoint.lasting(partial(pool.submit, self._flush))
        #: due when a call has failed that was to make an object
        self._failures = agent.endpoint.lasting(partial(pool.submit, self._look_for_failures))

    def new_ident(self) -> str:
        return f"{self._agent.worker.incarnation}/{next(self._numbers)}"

    def begin(self, owner: Worker, ident: str) -> tuple[Owned | None, ObjectHold | None]:
        """One more reference of this process."""
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
        """A reference was finalised, anywhere: nothing may block here."""
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
        """``created`` is the call by which this worker has an object made, its own one if not ``held``."""
        if held is None:
            created.add_done_callback(partial(self._made_here, ident))
            return
        held.created = created
        source: Any = created._source
        if source is None or source.notify_failure(self._failures):
            self._follow(ident, held)

    def _look_for_failures(self) -> None:
        """A call that was to make an object has failed: others must not wait for the object."""
        with self.ledger.lock:
            held = list(self._held.items())
        for ident, each in held:
            if each.created is not None and not each.settled and each.created.done():
                self._follow(ident, each)

    def _follow(self, ident: str, held: ObjectHold) -> bool:
        """See to it that the owner of an object hears if the call fails which is to make it.

        Returns:
            Whether nothing is left to do: the object was not asked for here, is made, or the owner was told.
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
        """Tell the owner that the call which was to make an object has failed; it may have begun to."""
        for _ in range(_ATTEMPTS):
            try:
                self._agent.ask(owner, call_off, ident, *_told(error)).wait()
                return
            except WorkerLost:
                continue  # if only the connection broke, the next one tells it
            except ShoalError:
                return

    def _give_back(self, ident: str, held: ObjectHold) -> None:
        """The last reference of this process has gone, unless there are others."""
        with held.account.lock:
            with self.ledger.lock:
                if held.objects or self._held.get(ident) is not held:
                    return
                del self._held[ident]
            if held.told:
                with contextlib.suppress(ShoalError):  # with the owner the object is gone too
                    self._agent.tell(held.account.owner, drop, ident, self._agent.worker.incarnation)

    def confirm(self, ident: str, held: ObjectHold) -> None:
        """Tell the owner of a hold, unless it knows of one; it does when this returns."""
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
        # It is dead, as whoever uses the reference will hear.

    def standing(self) -> list[str]:
        """The holds of this worker, and those that it keeps for replies on their way, in words."""
        with self.ledger.lock:
            held = [(ident, each.account.owner.name, each.objects) for ident, each in self._held.items()]
            pinned = sum(map(len, self._pinned.values()))
        found = [f"holds {counted(n, 'reference')} to {ident} of {owner!r}" for ident, owner, n in held]
        if pinned:
            found.append(f"keeps {counted(pinned, 'reference')} until they have arrived")
        return found

    def lost(self, worker: Worker) -> None:
        """A connection to or from ``worker`` has ended."""
        self._begin_lease(worker.incarnation)
        if (account := self._accounts.get(worker.incarnation)) is not None:
            pool.submit(partial(self._resume, account))

    def _resume(self, account: Account) -> None:
        """Tell an owner, over a new connection, what this worker holds."""
        owner, me = account.owner, self._agent.worker.incarnation
        with account.lock, contextlib.suppress(ShoalError):  # with the owner all of it has gone
            self._agent.line(owner.name, self._agent.timeout, owner)
            with self.ledger.lock:
                mine = [i for i, held in self._held.items() if held.account is account and held.told]
            self._agent.tell(owner, resume, me, mine)

    def _begin_lease(self, holder: str) -> None:
        """Let the holds of ``holder`` end unless it is connected when its lease is over."""
        self._losses[holder] = loss = object()
        self._agent.endpoint.after(LEASE, partial(self._end_lease, holder, loss))

    def _end_lease(self, holder: str, loss: object) -> None:
        if self._losses.get(holder) is not loss:
            return  # it came again and was lost once more: that lease runs
        del self._losses[holder]
        if not self._agent.links.connected(holder):
            self.ledger.forget(holder)

    def make(self, ident: str, holder: str, made: str, line: int) -> Owned:
        """An object is about to be made by a call that came on ``line``; see :meth:`Ledger.begin`."""
        owned = self.ledger.begin(ident, holder, made, line)
        if holder:
            self.heard(holder, line)
        return owned

    def hold(self, ident: str, holder: str, line: int) -> None:
        """``holder`` has told on ``line`` that it holds an object."""
        self._awaiting_maker(ident, self.ledger.hold(ident, holder, line))
        self.heard(holder, line)

    def heard(self, holder: str, line: int) -> None:
        """``holder`` has told of a hold, and may be lost since, or even for longer than its lease."""
        if self._agent.links.ended(line):
            self._begin_lease(holder)

    def _awaiting_maker(self, ident: str, owned: Owned) -> Owned:
        """``owned``, which may yet have to be made, by a worker that may be lost."""
        maker, me = ident.partition("/")[0], self._agent.worker.incarnation
        if not (owned.begun or owned.value.done() or maker == me or self._agent.links.connected(maker)):
            self._begin_lease(maker)
        return owned

    # -- references on their way ---------------------------------------------------------------

    def pin_reply(self, line: int, call: int, refs: Sequence[Any]) -> None:
        """Keep references that went out in a reply until the caller has told their owners of its holds."""
        self._pinned[line, call] = refs

    def unpin(self, line: int, call: int) -> None:
        self._pinned.pop((line, call), None)

    def unread(self, line: WorkerConnection, call: Call) -> None:
        """Nobody will look at the reply to ``call``: if references are in it, its callee must hear so.

        Called by finalizers, anywhere: nothing may block here.
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
        self._most_unread = 2 * len(self._unread) + _FEW
        for line, numbers in pinned.items():
            self._agent.acknowledge(line, *numbers)

    def unpin_line(self, line: int) -> None:
        for key in [key for key in list(self._pinned) if key[0] == line]:
            self._pinned.pop(key, None)


def hold(ident: str, holder: str) -> None:
    """A worker has got a reference."""
    served = current()
    served.agent.references.hold(ident, holder, served.peer)


def _told(error: BaseException) -> tuple[type[RpcError], str]:
    """The error, as class and text, for the users of an object whose making has failed."""
    kind = CallCancelled if isinstance(error, CallCancelled) else RpcError
    return kind, str(error) if isinstance(error, ShoalError) else in_words(error)


def call_off(ident: str, kind: type[RpcError], why: str) -> None:
    """A worker has asked for an object by a call that failed."""
    current().agent.references.ledger.call_off(ident, kind, why)


def drop(ident: str, holder: str) -> None:
    """A worker has let go of its last reference."""
    current().agent.references.ledger.drop(ident, holder)


def resume(holder: str, held: list[str]) -> None:
    """A worker has connected anew."""
    served = current()
    served.agent.references.ledger.resume(holder, held, served.peer)
    served.agent.references.heard(holder, served.peer)


def _may_pin(call: Call) -> bool:
    """Whether the callee may keep references for a call that has ended, whose reply nobody has taken."""
    failed = call.error()
    if failed is None:
        return bool(call.reply().flags & PINS) if call.number else False
    return failed.end in (CallEnd.CANCELLED, CallEnd.TIMEOUT)  # its reply may have been on its way


def unpin(*numbers: int) -> None:
    """The references in the replies to these calls have arrived, or nobody wants them."""
    served = current()
    for number in numbers:
        served.agent.references.unpin(served.peer, number)
