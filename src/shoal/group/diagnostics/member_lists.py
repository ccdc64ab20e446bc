"""Detection of members of a subgroup that passed different lists of ranks.

``subgroup`` does not communicate, so ranks that pass different lists make different groups, and wait in vain.
So while the first collective or receive of a subgroup is pending, each rank publishes its subgroups in the
parent's store, and reads those of the other members.  Correct programs only pay for a sleeping thread: the
store is not used before an operation has waited for :data:`CHECK_DELAY_S` seconds.

A rank passed a different list if it waits in a subgroup that has this rank as a member and that this rank has
not made, and has not made the subgroup in which this rank waits.  As members make their common subgroups in
the same order, neither can continue.  The first rank to detect this aborts both subgroups with the reason.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from ...common.decoding import from_json
from ...errors import ShoalError, UsageError
from ...future import Future
from ...spec import GroupState
from ..submission import OperationSubmitter

if TYPE_CHECKING:
    from ..process_group import ProcessGroup

#: Seconds for which a first operation is pending before the first check, and between the first two checks.
CHECK_DELAY_S = 0.5
_MAX_CHECK_INTERVAL_S = 8.0


@dataclass(frozen=True)
class SubgroupCall:
    """The arguments of a call of ``subgroup``, the ``count``-th with these, and the text of its options."""

    name: str | None
    choices: str
    members: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        return f"{list(self.members)}{self.choices and f' with {self.choices}'}"


@dataclass
class _PendingConnect:
    """A wait of this rank for the other members of a subgroup to connect."""

    parent: ProcessGroup
    given: SubgroupCall

    def abort(self, reason: str) -> None:
        """Do nothing, as there is no group yet: the call that connects raises."""


@dataclass
class _FirstOperation(_PendingConnect):
    """A pending first operation of a subgroup, which the thread checks at the time ``due``."""

    group: OperationSubmitter
    future: ref[Future[Any]]
    due: float
    interval: float = CHECK_DELAY_S

    def is_finished(self) -> bool:
        future = self.future()
        return future is None or self.group.state is not GroupState.OPEN or future.done()

    def abort(self, reason: str) -> None:
        self.group.abort(reason)


class MemberListChecker:
    """Checks the subgroups of one world on one rank, in a thread that runs while any of them waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._connecting: list[_PendingConnect] = []
        self._pending: list[_FirstOperation] = []
        self._thread: threading.Thread | None = None

    def watch_operation(
        self, parent: ProcessGroup, given: SubgroupCall, group: OperationSubmitter, future: Future[Any]
    ) -> None:
        """Check the first operation of ``group``, made by ``parent.subgroup``, until ``future`` is done."""
        with self._condition:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="shoal-lists", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return  # no more threads: the operation still has its timeout
                self._thread = thread
            due = time.monotonic() + CHECK_DELAY_S
            self._pending.append(_FirstOperation(parent, given, group, ref(future), due))
            self._condition.notify()  # the thread may sleep beyond ``due``

    def unwatch(self, group: OperationSubmitter, timeout: float) -> None:
        """Stop checking ``group``, which is closed; the thread ends with the last wait."""
        with self._condition:
            self._pending = [wait for wait in self._pending if wait.group is not group]
            if self._pending:
                return
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._pending:
                    self._condition.wait(max(min(wait.due for wait in self._pending) - time.monotonic(), 0.0))
                if not self._pending:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [wait for wait in self._pending if wait.due <= now]
            finished = [wait for wait in due if wait.is_finished() or self._check(wait)]
            with self._condition:
                self._pending = [wait for wait in self._pending if not any(wait is each for each in finished)]
            del due, finished  # so that they do not keep groups alive

    def _check(self, wait: _FirstOperation) -> bool:
        """Compare with the subgroups of the other members; return whether the checks are finished."""
        try:
            others = self._exchange(wait)
        except Exception:
            return True  # the store is not reachable; the operation still has its timeout
        difference = _difference(wait, others)
        if difference is None:
            wait.interval = min(2 * wait.interval, _MAX_CHECK_INTERVAL_S)
            wait.due = time.monotonic() + wait.interval
            return False
        self._abort_both(wait, *difference)
        return True

    def _abort_both(self, wait: _PendingConnect, reason: str, theirs: SubgroupCall) -> None:
        """Abort the group of ``wait`` and the one of ``theirs`` with the reason."""
        # The other group is made first, as this rank may leave as soon as its own group is aborted.  It is
        # aborted last: its ranks may leave then, so this rank's group must have received the reason before.
        with contextlib.ExitStack() as stack:
            foreign = None
            with contextlib.suppress(ShoalError):
                foreign = wait.parent._subgroup(list(theirs.members), theirs.name, None, asked=theirs.choices)
                # After the first abort another thread may close the world: not this group before its abort.
                stack.enter_context(foreign._closing)
            wait.abort(reason)
            if foreign is not None:
                foreign.abort(reason)
        if foreign is not None:
            with contextlib.suppress(ShoalError):
                foreign.close(CHECK_DELAY_S)

    @contextlib.contextmanager
    def watch_connect(self, parent: ProcessGroup, given: SubgroupCall) -> Iterator[Callable[[], None]]:
        """Yield a function to poll while members connect, which raises if their lists differ."""
        wait = _PendingConnect(parent, given)
        with self._condition:
            self._connecting.append(wait)
        began = time.monotonic()

        def look() -> None:
            if time.monotonic() - began < CHECK_DELAY_S:
                return
            difference = _difference(wait, self._exchange(wait))
            if difference is not None:
                self._abort_both(wait, *difference)
                raise UsageError(difference[0])

        try:
            yield look
        finally:
            with self._condition:
                self._connecting = [each for each in self._connecting if each is not wait]

    def _exchange(self, wait: _PendingConnect) -> dict[int, Any]:
        """Publish the subgroups of this rank, and return those that the other members have published."""
        self._publish(wait)
        store, me = wait.parent.store, wait.parent.rank
        members = [rank for rank in wait.given.members if rank != me and store.check([_key(rank)])]
        return {rank: from_json(store.get(_key(rank), timeout=CHECK_DELAY_S), dict) for rank in members}

    def _publish(self, wait: _PendingConnect) -> None:
        with self._condition:
            waits = [other for other in (*self._connecting, *self._pending) if other.parent is wait.parent]
        made = [[*identity, count] for identity, count in wait.parent._made.copy().items()]
        waiting = [
            [other.given.name, other.given.choices, *other.given.members, other.given.count]
            for other in waits
        ]
        wait.parent.store.set(_key(wait.parent.rank), json.dumps({"made": made, "waiting": waiting}))


def _key(rank: int) -> str:
    return f"subgroups of rank {rank}"


def _parsed(entries: Iterable[list[Any]]) -> list[SubgroupCall]:
    return [SubgroupCall(name, choices, tuple(members), count) for name, choices, *members, count in entries]


def _difference(wait: _PendingConnect, others: dict[int, Any]) -> tuple[str, SubgroupCall] | None:
    """Return an error message and another rank's different list; None if no list differs."""
    parent, given = wait.parent, wait.given
    for rank, theirs in others.items():
        if any(_same(other, given) and other.count >= given.count for other in _parsed(theirs["made"])):
            continue
        for other in _parsed(theirs["waiting"]):
            made = parent._made.get((other.name, other.choices, *other.members), 0)
            if other.name == given.name and parent.rank in other.members and made + 1 == other.count:
                named = "" if given.name is None else f" {given.name!r}"
                return (
                    f"the members of a subgroup{named} of group {parent.name!r} gave different lists: "
                    f"rank {parent.rank} gave {given}, rank {rank} gave {other}; "
                    "every member gives the same list, in the same order, with the same arguments"
                ), other
    return None


def _same(one: SubgroupCall, other: SubgroupCall) -> bool:
    return (one.name, one.choices, one.members) == (other.name, other.choices, other.members)
