"""The owner's ledger of objects that other workers use: their holders, and when their holds end.

The owner knows of each object who holds it.  A worker that gets a reference tells the owner before it uses
it, and tells it once more when the last of its references to the object has gone, in this order; so either
may be said twice.  A worker that is lost keeps its holds for :data:`LEASE` seconds: what it has passed on
shortly before can still be taken up, and if only a connection broke, it comes again and says what it holds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ...errors import RpcError, WorkerLost
from ...future import Future

#: seconds that the holds of a lost worker last, and those of messages of which nothing more is heard
LEASE = 10.0
#: objects that have ended of which that is remembered
_REMEMBERED = 1 << 16
#: the text of errors of those who use such an object
_ENDED = f"has ended: nobody held it any more, or its holder was cut off for more than {LEASE:.0f} s"
#: mailboxes below are for other purposes
_FIRST_MAILBOX = 16


@dataclass(slots=True)
class Owned:
    """An object that this worker keeps.

    Attributes:
        value: the object, as soon as it is made.
        holders: the other workers that hold it, by their incarnations, and the connection on which each
            told so last.
        local: how many references to it there are in this process.
        mailbox: of an actor; 0: it is none.
        begun: the call that makes it has come.  What uses it may overtake that call, and its own reference
            may be gone before: so the object stays until the call has come and told who holds it.
        made: what made it, for those who look for leaks.
    """

    value: Future[Any] = field(default_factory=Future)
    holders: dict[str, int] = field(default_factory=dict)
    local: int = 0
    mailbox: int = 0
    begun: bool = False
    made: str = ""


class Ledger:
    """The objects of one owner.

    Args:
        release: called with the mailbox of an actor that nobody holds any more.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self.lock = threading.RLock()
        self._owned: dict[str, Owned] = {}
        #: those that have ended, or are never made, the oldest first, and what their users hear
        self._ended: dict[str, tuple[type[RpcError], str]] = {}
        self._mailboxes = itertools.count(_FIRST_MAILBOX)

    def entry(self, ident: str) -> Owned:
        """The object ``ident``, which may yet have to be made; if it has ended, one whose use says so."""
        with self.lock:
            if ident not in self._ended:
                return self._owned.setdefault(ident, Owned())
            ended = Owned()
            kind, why = self._ended[ident]
            ended.value.set_exception(kind(f"the object {ident} {why}"))
            return ended

    def begin(self, ident: str, holder: str, made: str, line: int = 0) -> Owned:
        """The object ``ident`` is about to be made, and ``holder`` has a reference to it; "" is this process.

        Args:
            made: what makes it.
            line: the connection on which the call came that makes it.

        Raises:
            RpcError: it was called off before.
        """
        with self.lock:
            owned = self.hold(ident, holder, line) if holder else self.entry(ident)
            if owned.value.done():
                owned.value.value()  # raises why
            owned.begun = True
            owned.made = made
            return owned

    def hold(self, ident: str, holder: str, line: int = 0) -> Owned:
        """``holder`` has told on ``line`` that it holds it; "" is a reference more in this process."""
        with self.lock:
            owned = self.entry(ident)
            if holder:
                owned.holders[holder] = max(line, owned.holders.get(holder, 0))
            else:
                owned.local += 1
            return owned

    def drop(self, ident: str, holder: str) -> None:
        """``holder`` holds the object no longer; "" is a reference less in this process."""
        with self.lock:
            owned = self._owned.get(ident)
            if owned is None:
                return
            if holder:
                owned.holders.pop(holder, None)
            else:
                owned.local -= 1
            self._end_unless_held(ident, owned)

    def resume(self, holder: str, held: Collection[str], line: int) -> None:
        """``holder`` has connected anew, by ``line``: of what it told before that, these holds are left."""
        with self.lock:
            for ident, owned in list(self._owned.items()):
                if ident in held:
                    self.hold(ident, holder, line)
                elif owned.holders.get(holder, line) < line:
                    self.drop(ident, holder)

    def forget(self, holder: str) -> None:
        """The lease of a lost worker has run out."""
        with self.lock:
            for ident, owned in list(self._owned.items()):
                if owned.holders.pop(holder, None) is not None:
                    self._end_unless_held(ident, owned)
                if ident.startswith(f"{holder}/"):
                    self.call_off(ident, WorkerLost, "the worker that asked for it is lost")

    def call_off(self, ident: str, kind: type[RpcError], why: str) -> None:
        """The call that makes an object has ended before it began; one that comes all the same is late.

        Args:
            kind, why: what whoever uses the object hears.
        """
        with self.lock:
            owned = self._owned.get(ident)
            if ident in self._ended or (owned is not None and owned.begun):
                return
            self._end(ident, kind, f"was never made: {why}")
        if owned is not None:
            owned.value.set_exception(kind(f"the object {ident} was never made: {why}"))

    def mailbox(self, ident: str, owned: Owned, consume: Callable[[int], None]) -> int:
        """A mailbox for the calls of an actor, which ``consume`` opens; 0: nobody holds it any more."""
        with self.lock:
            if self._owned.get(ident) is owned:
                owned.mailbox = self.new_mailbox()
                consume(owned.mailbox)
            return owned.mailbox

    def new_mailbox(self) -> int:
        """The number of a mailbox that nothing has."""
        return next(self._mailboxes)

    def held(self) -> dict[str, Owned]:
        """The objects that are held, by their identity."""
        with self.lock:
            return dict(self._owned)

    def _end_unless_held(self, ident: str, owned: Owned) -> None:
        if not owned.holders and not owned.local and owned.begun:
            self._end(ident, RpcError, _ENDED)
            if owned.mailbox:
                self._release(owned.mailbox)

    def _end(self, ident: str, kind: type[RpcError], why: str) -> None:
        self._owned.pop(ident, None)
        self._ended[ident] = kind, why
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
