"""The owner's table of objects that other workers use: their holders, and the end of holds.

A worker that receives a reference sends ``hold`` to the owner before it uses the reference, and ``drop`` when
its last reference to the object was released.  They arrive in order, so duplicates do no harm.  The holds of
a lost worker last for another :data:`LEASE_S` seconds: the receivers of references that it passed on shortly
before can still send ``hold``, and if only a connection broke, it reconnects and sends ``replace_holds``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ...errors import RpcError, WorkerLost
from ...future import Future

#: seconds that the holds of a lost worker last, and references in messages without a confirmation
LEASE_S = 10.0
#: maximum number of released objects that are remembered
_MAX_RELEASED = 1 << 16
#: text of the error for a use of such an object
_ENDED = f"was released: it had no holders left, or its holder was unreachable for more than {LEASE_S:.0f} s"
#: lower mailboxes have other purposes
_FIRST_MAILBOX = 16


@dataclass(slots=True)
class OwnedObject:
    """An object that this worker owns.

    Attributes:
        value: completes with the object when it is created.
        holders: incarnation of each other worker that holds it -> the connection of its last ``hold``.
        local: number of references to it in this process.
        mailbox: of an actor; 0: not an actor.
        begun: whether the call that creates it has arrived.  Its uses may overtake that call, and their
            references may be released first: so the object is kept until the call has added its holder.
        made: description of the call that created it, for finding leaks.
    """

    value: Future[Any] = field(default_factory=Future)
    holders: dict[str, int] = field(default_factory=dict)
    local: int = 0
    mailbox: int = 0
    begun: bool = False
    made: str = ""


class ObjectTable:
    """The objects of one owner.

    Args:
        release: called with the mailbox of an actor without holders.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self.lock = threading.RLock()
        self._owned: dict[str, OwnedObject] = {}
        #: objects that were released or never created, the oldest first -> the error for their uses
        self._ended: dict[str, tuple[type[RpcError], str]] = {}
        self._mailboxes = itertools.count(_FIRST_MAILBOX)

    def entry(self, ident: str) -> OwnedObject:
        """Return the object ``ident``, perhaps not yet created; if it was released, one whose use raises."""
        with self.lock:
            if ident not in self._ended:
                return self._owned.setdefault(ident, OwnedObject())
            ended = OwnedObject()
            kind, why = self._ended[ident]
            ended.value.set_exception(kind(f"the object {ident} {why}"))
            return ended

    def begin(self, ident: str, holder: str, made: str, connection: int = 0) -> OwnedObject:
        """Begin to create the object ``ident`` for ``holder``; "" is this process.

        Args:
            made: description of the call that creates it.
            connection: number of the connection of that call.

        Raises:
            RpcError: its creation was cancelled before.
        """
        with self.lock:
            owned = self.hold(ident, holder, connection) if holder else self.entry(ident)
            if owned.value.done():
                owned.value.value()  # raises the error
            owned.begun = True
            owned.made = made
            return owned

    def hold(self, ident: str, holder: str, connection: int = 0) -> OwnedObject:
        """Add a holder, which sent ``hold`` on ``connection``; "" adds a reference of this process."""
        with self.lock:
            owned = self.entry(ident)
            if holder:
                owned.holders[holder] = max(connection, owned.holders.get(holder, 0))
            else:
                owned.local += 1
            return owned

    def drop(self, ident: str, holder: str) -> None:
        """Remove a holder; "" removes a reference of this process."""
        with self.lock:
            owned = self._owned.get(ident)
            if owned is None:
                return
            if holder:
                owned.holders.pop(holder, None)
            else:
                owned.local -= 1
            self._end_unless_held(ident, owned)

    def replace_holds(self, holder: str, held: Collection[str], connection: int) -> None:
        """Replace the holds of ``holder`` from before its new connection ``connection`` by ``held``."""
        with self.lock:
            for ident, owned in list(self._owned.items()):
                if ident in held:
                    self.hold(ident, holder, connection)
                elif owned.holders.get(holder, connection) < connection:
                    self.drop(ident, holder)

    def forget(self, holder: str) -> None:
        """Remove the holds of a lost worker, whose lease has expired."""
        with self.lock:
            for ident, owned in list(self._owned.items()):
                if owned.holders.pop(holder, None) is not None:
                    self._end_unless_held(ident, owned)
                if ident.startswith(f"{holder}/"):
                    self.cancel_creation(ident, WorkerLost, "the worker that asked for it is lost")

    def cancel_creation(self, ident: str, kind: type[RpcError], why: str) -> None:
        """Cancel the creation of an object whose call failed; no effect if the creation has begun.

        Args:
            kind, why: class and text of the error for uses of the object.
        """
        with self.lock:
            owned = self._owned.get(ident)
            if ident in self._ended or (owned is not None and owned.begun):
                return
            self._end(ident, kind, f"was never made: {why}")
        if owned is not None:
            owned.value.set_exception(kind(f"the object {ident} was never made: {why}"))

    def mailbox(self, ident: str, owned: OwnedObject, start_mailbox: Callable[[int], None]) -> int:
        """Return a mailbox for the calls of an actor; 0: it has no holders left."""
        with self.lock:
            if self._owned.get(ident) is owned:
                owned.mailbox = self.new_mailbox()
                start_mailbox(owned.mailbox)
            return owned.mailbox

    def new_mailbox(self) -> int:
        """Return an unused mailbox number."""
        return next(self._mailboxes)

    def held(self) -> dict[str, OwnedObject]:
        """Return the owned objects by identity."""
        with self.lock:
            return dict(self._owned)

    def _end_unless_held(self, ident: str, owned: OwnedObject) -> None:
        if not owned.holders and not owned.local and owned.begun:
            self._end(ident, RpcError, _ENDED)
            if owned.mailbox:
                self._release(owned.mailbox)

    def _end(self, ident: str, kind: type[RpcError], why: str) -> None:
        self._owned.pop(ident, None)
        self._ended[ident] = kind, why
        if len(self._ended) > _MAX_RELEASED:
            del self._ended[next(iter(self._ended))]
