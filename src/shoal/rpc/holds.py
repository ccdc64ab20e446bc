"""The objects that this worker owns for others and holds of theirs, and the messages about them.

A holder tells the owner of its hold before it uses a reference that it was sent, and the sender keeps its own
until then: until a call has its reply, or until the caller says that what came in a reply is held.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import ShoalError, WorkerLost
from ..future import Future, pool
from .current import current
from .directory import Worker
from .leases import LEASE, Ledger, Owned

#: mailbox of what workers tell one another of their holds
HOLDS = 1


class Held:
    """This worker's holds of one object of another: local references, and holds that the owner knows."""

    __slots__ = ("count", "created", "objects", "owner")

    def __init__(self, owner: Worker) -> None:
        self.owner = owner
        self.objects = 0
        self.count = 0
        self.created: Future[Any] | None = None


class References:
    """The objects that one agent owns for others, and those that it holds of theirs."""

    def __init__(self, agent: Any, release: Callable[[int], None]) -> None:
        self._agent = agent
        self.ledger = Ledger(release)
        self._held: dict[str, Held] = {}
        self._numbers = itertools.count(1)
        self._gone: deque[str] = deque()
        #: of each worker that was lost, the last loss, from which its lease runs
        self._losses: dict[str, object] = {}
        self._pinned: dict[tuple[int, int], Sequence[Any]] = {}
        self._ticket = agent.endpoint.lasting(partial(pool.submit, self._flush))

    def new_ident(self) -> str:
        return f"{self._agent.worker.incarnation}/{next(self._numbers)}"

    def begin(self, owner: Worker, ident: str) -> tuple[Owned | None, Held | None]:
        """One more reference of this process."""
        with self.ledger.lock:
            if owner.incarnation == self._agent.worker.incarnation:
                return self.ledger.hold(ident, ""), None
            held = self._held.get(ident)
            if held is None:
                held = self._held[ident] = Held(owner)
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
                del self._held[ident]
            if held.created is not None and not held.created.done():
                held.created.add_done_callback(partial(self._created, ident, held))
            else:
                self._give_back(ident, held)

    def _created(self, ident: str, held: Held, _: Future[Any]) -> None:
        self._give_back(ident, held)

    def _give_back(self, ident: str, held: Held) -> None:
        if held.count:
            with contextlib.suppress(ShoalError):  # with the owner the object is gone too
                self._agent.tell(held.owner, drop, ident, self._agent.worker.incarnation, held.count)

    def confirm(self, ident: str, held: Held) -> None:
        """Tell the owner of a hold, unless it knows of one; it does when this returns."""
        if not held.count:
            with contextlib.suppress(WorkerLost):  # who uses the reference will hear of that
                self._agent.ask(held.owner, hold, ident, self._agent.worker.incarnation).wait()
                held.count += 1

    def lost(self, worker: Worker) -> None:
        """A connection to or from ``worker`` has ended."""
        self._losses[worker.incarnation] = loss = object()
        self._agent.endpoint.after(LEASE, partial(self._end_lease, worker, loss))
        with self.ledger.lock:
            held = [(ident, held) for ident, held in self._held.items() if held.owner == worker]
        mine = {ident: each.count for ident, each in held if each.count}
        if mine:
            pool.submit(partial(self._resume, worker, mine))

    def _resume(self, owner: Worker, mine: dict[str, int]) -> None:
        with contextlib.suppress(ShoalError):
            self._agent.tell(owner, resume, self._agent.worker.incarnation, mine)

    def _end_lease(self, worker: Worker, loss: object) -> None:
        if self._losses.get(worker.incarnation) is not loss:
            return  # it came again and was lost once more: that lease runs
        del self._losses[worker.incarnation]
        if not self._agent.links.connected(worker.incarnation):
            self.ledger.forget(worker.incarnation)

    # -- references on their way ---------------------------------------------------------------

    def pin_reply(self, line: int, call: int, refs: Sequence[Any]) -> None:
        """Keep references that went out in a reply until the caller has told their owners of its holds."""
        self._pinned[line, call] = refs

    def unpin(self, line: int, call: int) -> None:
        self._pinned.pop((line, call), None)

    def unpin_line(self, line: int) -> None:
        for key in [key for key in list(self._pinned) if key[0] == line]:
            self._pinned.pop(key, None)


def hold(ident: str, holder: str) -> None:
    """A worker has got a reference."""
    current().agent.references.ledger.hold(ident, holder)


def drop(ident: str, holder: str, count: int) -> None:
    """A worker has let go of its last reference."""
    current().agent.references.ledger.drop(ident, holder, count)


def resume(holder: str, held: dict[str, int]) -> None:
    """A worker has connected anew."""
    current().agent.references.ledger.resume(holder, held)


def unpin(number: int) -> None:
    """The references in the reply to call ``number`` have arrived."""
    served = current()
    served.agent.references.unpin(served.peer, number)
