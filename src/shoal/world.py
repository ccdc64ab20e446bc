"""A world: the connections of this process to the others of its job, and the groups that use them.

Groups know their world; a world knows its groups only as :class:`Member`, for forks and the end of the
process. Closing the last group closes the connections and leaves the rendezvous, unless an agent of
:mod:`shoal.rpc` still uses it. When the interpreter exits, worlds with open groups are closed, so that the
other ranks see a regular close and not a lost connection. If an uncaught exception ends the process, the
groups are aborted, so that the other ranks get the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from . import config, failure_report
from .backend.base import Backend
from .backend.registry import BackendFactory
from .common.arguments import checked_seconds
from .common.copy_refusal import refuses_copies
from .common.formatting import describe_error
from .common.mpi_library import mark_broken
from .errors import CollectiveMismatch
from .links import Links
from .rendezvous.membership import Membership

#: timeout in seconds for closing open groups when the process ends
_EXIT_TIMEOUT_S = 10.0
#: timeout in seconds for closing connections after the first group could not be created
_FAILED_EXIT_TIMEOUT_S = 5.0


class Member(Protocol):
    """The interface of a group to its world."""

    def abort(self, reason: str) -> None: ...

    def _begin_close(self) -> None: ...

    def close(self, timeout: float) -> None: ...

    def _become_forked(self) -> None: ...


M = TypeVar("M", bound=Member)


@refuses_copies(
    "the world of a process group",
    "connections to the other ranks",
    "Keep the group outside of the object that you copy",
)
class World:
    """The membership of one process in a job, and its connections.

    Attributes:
        membership: rank, size, job, secret, interface and store.
        links: connections to all other ranks.
        losses_reported: whether calls of an agent report lost ranks to the program.
    """

    def __init__(
        self, membership: Membership, backend: Backend, factory: BackendFactory, options: Mapping[str, Any]
    ) -> None:
        self.membership = membership
        self.links = Links(backend, tuple(range(membership.size)), factory, dict(options))
        # Reentrant: the garbage collector may drop a group inside a critical section of the same thread.
        self._lock = threading.RLock()
        self._open: dict[int, tuple[weakref.ref[Any], Links]] = {}
        #: groups without an owner in the program, until they are closed
        self._retained: list[Any] = []
        self._ended = False
        #: number of users of the membership that are not groups
        self._users = 0
        self._left = False
        self._begun = time.monotonic()
        self._summarises = config.SUMMARY.get()
        self.losses_reported = False

    @classmethod
    def connect(
        cls, membership: Membership, factory: BackendFactory, *, timeout: float, options: Mapping[str, Any]
    ) -> World:
        """Connect the world of ``membership``; if that fails, notify the other ranks."""
        try:
            backend = factory(membership, timeout=timeout, **options)
            try:
                membership.connected()
            except BaseException:
                backend.close(_FAILED_EXIT_TIMEOUT_S)
                raise
        except BaseException as error:
            membership.abandon(error)
            raise
        return cls(membership, backend, factory, options)

    # -- its groups ----------------------------------------------------------------------------

    def make(self, links: Links, make: Callable[[], M]) -> M | None:
        """Create a group by ``make``, and register it; return None if the world is closed.

        The group uses ``links``, which are closed with their last group, or at once if no group uses them.

        If the first group of a world cannot be created, the world is released.
        """
        try:
            with self._lock:
                if self._ended:
                    return None
                try:
                    member = make()
                except BaseException:
                    if not self._open:
                        self._ended = True
                        self._release(_FAILED_EXIT_TIMEOUT_S)
                    raise
                self._open[id(member)] = weakref.ref(member), links
                _worlds.add(self)
                return member
        finally:
            self._close_unused(links, _FAILED_EXIT_TIMEOUT_S)

    def members(self) -> list[Any]:
        """The open groups, the oldest first."""
        with self._lock:
            retained = {id(member): member for member in self._retained}
            found = [retained.get(key, reference()) for key, (reference, _) in self._open.items()]
        return [member for member in found if member is not None]

    def discard(self, member: Member, timeout: float) -> None:
        """Remove the closed ``member``; the last one closes the connections, within ``timeout`` seconds."""
        with self._lock:
            _, links = self._open.pop(id(member))
            self._retained = [each for each in self._retained if each is not member]
            last = not self._open
            self._ended |= last
        deadline = time.monotonic() + timeout
        try:
            self._close_unused(links, timeout)
        finally:
            if last:
                try:
                    self._release(remaining(deadline))
                finally:
                    # Not before: until here a forked child inherits connections.
                    _worlds.discard(self)

    def _in_use(self) -> set[Links]:
        return {self.links, *(links for _, links in self._open.values())}

    def _close_unused(self, links: Links, timeout: float) -> None:
        with self._lock:
            used = links in self._in_use()
        if not used:
            links.backend.close(timeout)

    def retain(self, member: Member) -> None:
        """Keep ``member`` open until the first group closes, also if the program releases it."""
        with self._lock:
            self._retained.append(member)

    def dropped(self, member: Member) -> None:
        """Close ``member``, which the program has released without closing it.

        A new thread closes it, because the garbage collector may call this anywhere.
        """
        with self._lock:
            if id(member) not in self._open:
                return
            self._retained.append(member)
        text = f"{member!r} was dropped and never closed: use it in a with block, or call close()"
        closer = threading.Thread(
            target=member.close, args=(_EXIT_TIMEOUT_S,), name="shoal-dropped", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no more threads can start: it is closed with the world
            closer.start()
        warnings.warn(text, ResourceWarning, stacklevel=3, source=member)

    def _release(self, timeout: float) -> None:
        if lost := self.links.backend.lost():
            mark_broken()
            self.membership.lost.update(lost)
        if self._summarises:
            self._report_summary()
        try:
            self.links.backend.close(timeout)
        finally:
            self._leave(timeout)

    def _report_summary(self) -> None:
        totals = self.links.backend.totals()
        if totals is None:
            return
        late = totals.late[: failure_report.MAX_LATE]
        summary = failure_report.WaitSummary(
            time.monotonic() - self._begun, totals.completed, totals.bytes, totals.waited_s,
            totals.latency(0.5) or 0.0, totals.latency(0.99) or 0.0,
            tuple((each.times, each.seconds) for each in late),
        )  # fmt: skip
        failure_report.summarised(summary, [each.rank for each in late], self.membership.meeting)

    def enter(self) -> None:
        """Keep the membership and its store open until :meth:`exit`, even after all groups are closed."""
        with self._lock:
            self._users += 1

    def exit(self, timeout: float) -> None:
        """Undo :meth:`enter`; the last user leaves the rendezvous, within ``timeout`` seconds."""
        with self._lock:
            self._users -= 1
        self._leave(timeout)

    def _leave(self, timeout: float) -> None:
        """Leave the rendezvous, if this world is not used any more."""
        with self._lock:
            if self._left or self._users or self._open or not self._ended:
                return
            self._left = True
        self.membership.release(timeout)

    def abort(self, reason: str) -> None:
        """Abort all groups; see :meth:`shoal.ProcessGroup.abort`."""
        with contextlib.ExitStack() as all_of_them:  # calls all, even if one raises
            for member in reversed(self.members()):
                all_of_them.callback(member.abort, reason)

    def close(self, timeout: float) -> None:
        """Close all groups, the newest first, and then the connections.

        Args:
            timeout: total timeout in seconds.

        An exception from closing one group is raised after all have been closed.
        """
        deadline = time.monotonic() + checked_seconds("timeout", timeout)
        with self._lock:
            self._ended = True
        members = self.members()
        with contextlib.ExitStack() as all_of_them:  # calls in reverse order
            for member in members:
                all_of_them.callback(lambda member: member.close(remaining(deadline)), member)
            for member in reversed(members):
                all_of_them.callback(member._begin_close)

    def close_at_exit(self, error: BaseException | None) -> None:
        """Close open groups at the end of the program, and notify the other ranks.

        Args:
            error: the uncaught exception; None: the program finished, or called :func:`sys.exit`.
        """
        with self._lock:
            used = self._in_use()
        with contextlib.ExitStack() as all_of_them:  # calls in reverse order
            all_of_them.callback(self.close, _EXIT_TIMEOUT_S)
            if error is not None:
                all_of_them.callback(
                    self.abort, f"rank {self.membership.rank} ended with {describe_error(error)}"
                )
            for links in used:
                all_of_them.callback(links.backend.program_ends)

    def become_forked(self) -> None:
        """Disable this world in a forked child, without an effect on the parent."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        for member in self.members():
            member._become_forked()
        for links in self._in_use():
            links.backend.after_fork_in_child()


def remaining(deadline: float) -> float:
    """Seconds until ``deadline``, at least 0.1, so that even a late close can finish."""
    return max(deadline - time.monotonic(), 0.1)


#: the worlds that have open groups
_worlds: set[World] = set()


def open_groups() -> list[Any]:
    """The open groups of this process."""
    return [member for world in list(_worlds) for member in world.members()]


def _after_fork_in_child() -> None:
    """Disable all worlds in a forked child, which has no threads and shares sockets with the parent.

    A child that used the sockets would corrupt the parent's messages; a child that kept them open would hide
    the parent's death from its peers.
    """
    worlds = list(_worlds)
    _worlds.clear()
    for world in worlds:
        world.become_forked()


def _close_at_exit() -> None:
    # The uncaught exception that the interpreter printed; Python 3.12 renamed it.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):
        error = None
    if error is not None:
        failure_report.ended(error)
    mismatch: CollectiveMismatch | None = None
    for world in list(_worlds):
        try:
            world.close_at_exit(error)
        except CollectiveMismatch as found:
            mismatch = found
        except Exception:
            pass  # the program has ended and cannot handle it
    if error is None and mismatch is not None:  # as if the last line of the program had raised it
        failure_report.ended(mismatch)
        sys.excepthook(type(mismatch), mismatch.with_traceback(None), None)
        from .backend.native.channel import exit_with  # imported here: other backends do not need it

        exit_with(1)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_at_exit)
