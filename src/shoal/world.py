"""A world: what connects this process to the others of its job, and the groups that use it.

Groups know their world, and a world knows its groups only as :class:`Member`: what is done to all of them
when the process forks or ends. The connections live as long as any group does; the last one to be closed
closes them and leaves the rendezvous, unless an agent of :mod:`shoal.rpc` still uses it. Worlds that still
have open groups when the interpreter exits are closed then, so that the other ranks hear a goodbye and not a
lost connection; if an uncaught exception ends the process, the groups are aborted, so that the other ranks
hear the reason.
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

from . import failure_report
from .backend.base import Backend
from .backend.registry import BackendFactory
from .common.copy_refusal import refuses_copies
from .common.keywords import checked_seconds
from .common.wording import in_words
from .errors import CollectiveMismatch
from .links import Links
from .rendezvous.membership import Membership

#: seconds for closing what was left open when the process ends
_EXIT_TIMEOUT = 10.0
#: seconds for a goodbye after the first group could not be made
_FAILED_TIMEOUT = 5.0


class Member(Protocol):
    """A group, as its world sees it."""

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
    """One process's part in a job.

    Attributes:
        membership: rank, size, job, secret, interface and store.
        links: connect this process to all others.
        losses_reported: whether the program learns of lost ranks from the calls of an agent.
    """

    def __init__(
        self,
        membership: Membership,
        backend: Backend,
        *,
        factory: BackendFactory | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.membership = membership
        self.links = Links(backend, tuple(range(membership.size)), factory, dict(options or {}))
        # Reentrant: the garbage collector may find a group inside a critical section of the same thread.
        self._lock = threading.RLock()
        self._open: dict[int, tuple[weakref.ref[Any], Links]] = {}
        #: groups that the program dropped, until they are closed
        self._dropped: list[Any] = []
        self._ended = False
        #: how many use what the ranks met in, and are no groups
        self._guests = 0
        self._left = False
        self.losses_reported = False

    @classmethod
    def connect(
        cls, membership: Membership, factory: BackendFactory, *, timeout: float, options: Mapping[str, Any]
    ) -> World:
        """The world of ``membership``, connected; when that fails, the other ranks are told."""
        try:
            backend = factory(membership, timeout=timeout, **options)
            try:
                membership.connected()
            except BaseException:
                backend.close(_FAILED_TIMEOUT)
                raise
        except BaseException as error:
            membership.abandon(error)
            raise
        return cls(membership, backend, factory=factory, options=options)

    # -- its groups ----------------------------------------------------------------------------

    def make(self, links: Links, make: Callable[[], M]) -> M | None:
        """Register the group that ``make`` returns; None if the world has ended, and nothing was made.

        The group uses ``links``, which are closed with the last one that does, or at once if it is not made.

        A world whose first group cannot be made is released.
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
                        self._release(_FAILED_TIMEOUT)
                    raise
                self._open[id(member)] = weakref.ref(member), links
                _worlds.add(self)
                return member
        finally:
            self._close_unused(links, _FAILED_TIMEOUT)

    def members(self) -> list[Any]:
        """The groups that are not closed, the oldest first."""
        with self._lock:
            dropped = {id(member): member for member in self._dropped}
            found = [dropped.get(key, reference()) for key, (reference, _) in self._open.items()]
        return [member for member in found if member is not None]

    def discard(self, member: Member, timeout: float) -> None:
        """``member`` is closed.  The last one closes the connections, which may take ``timeout`` seconds."""
        with self._lock:
            _, links = self._open.pop(id(member))
            self._dropped = [each for each in self._dropped if each is not member]
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
                    # Not before: until now a forked child would have inherited connections.
                    _worlds.discard(self)

    def _in_use(self) -> set[Links]:
        return {self.links, *(links for _, links in self._open.values())}

    def _close_unused(self, links: Links, timeout: float) -> None:
        with self._lock:
            used = links in self._in_use()
        if not used:
            links.backend.close(timeout)

    def dropped(self, member: Member) -> None:
        """The program has lost the last reference to ``member`` without having closed it: do so.

        In a thread of its own, because the garbage collector calls this anywhere.
        """
        with self._lock:
            if id(member) not in self._open:
                return
            self._dropped.append(member)
        text = f"{member!r} was dropped and never closed: use it in a with block, or call close()"
        closer = threading.Thread(
            target=member.close, args=(_EXIT_TIMEOUT,), name="shoal-dropped", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no more threads: it is closed with the world
            closer.start()
        warnings.warn(text, ResourceWarning, stacklevel=3, source=member)

    def _release(self, timeout: float) -> None:
        try:
            self.links.backend.close(timeout)
        finally:
            self._leave(timeout)

    def enter(self) -> None:
        """Use the membership and its store until :meth:`exit`, also when all groups are closed before."""
        with self._lock:
            self._guests += 1

    def exit(self, timeout: float) -> None:
        """Use them no more; the last that does leaves the rendezvous, which may take ``timeout`` seconds."""
        with self._lock:
            self._guests -= 1
        self._leave(timeout)

    def _leave(self, timeout: float) -> None:
        """Leave the rendezvous, if nothing of this world is open."""
        with self._lock:
            if self._left or self._guests or self._open or not self._ended:
                return
            self._left = True
        self.membership.release(timeout)

    def abort(self, reason: str) -> None:
        """Abort all groups; see :meth:`shoal.ProcessGroup.abort`."""
        with contextlib.ExitStack() as all_of_them:  # whatever one of them raises
            for member in reversed(self.members()):
                all_of_them.callback(member.abort, reason)

    def close(self, timeout: float) -> None:
        """Close all groups, the newest first, and with the last one the connections.

        Args:
            timeout: in seconds, for all together.

        What the closing of one group raises is raised when all have been closed.
        """
        deadline = time.monotonic() + checked_seconds("timeout", timeout)
        with self._lock:
            self._ended = True
        members = self.members()
        with contextlib.ExitStack() as all_of_them:  # the last that is pushed comes first
            for member in members:
                all_of_them.callback(lambda member: member.close(remaining(deadline)), member)
            for member in reversed(members):
                all_of_them.callback(member._begin_close)

    def end_with_program(self, error: BaseException | None) -> None:
        """Close what the program has left open at its end, and tell the others that it ended.

        Args:
            error: the exception that ended it; None: it came to its end, or called :func:`sys.exit`.
        """
        with self._lock:
            used = self._in_use()
        with contextlib.ExitStack() as all_of_them:  # the last that is pushed comes first
            all_of_them.callback(self.close, _EXIT_TIMEOUT)
            if error is not None:
                all_of_them.callback(self.abort, f"rank {self.membership.rank} ended with {in_words(error)}")
            for links in used:
                all_of_them.callback(links.backend.program_ends)

    def become_forked(self) -> None:
        """In a forked child: nothing of this works, and nothing of the parent's is touched."""
        self._lock = threading.RLock()  # a thread that the child does not have may have held it
        for member in self.members():
            member._become_forked()
        for links in self._in_use():
            links.backend.after_fork_in_child()


def remaining(deadline: float) -> float:
    """Seconds until ``deadline``; even a late close gets a moment, so that nothing is left behind."""
    return max(deadline - time.monotonic(), 0.1)


#: the worlds that have open groups
_worlds: set[World] = set()


def living() -> list[Any]:
    """The groups of this process that are not closed."""
    return [member for world in list(_worlds) for member in world.members()]


def _after_fork_in_child() -> None:
    """A fork copies memory but not threads, and shares sockets with the parent.

    A child that used them would corrupt the parent's traffic, and one that merely kept them open would hide
    the parent's death from its peers.
    """
    worlds = list(_worlds)
    _worlds.clear()
    for world in worlds:
        world.become_forked()


def _close_at_exit() -> None:
    # The uncaught exception that the interpreter printed; 3.12 renamed it.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):
        error = None
    if error is not None:
        failure_report.ended(error)
    mismatch: CollectiveMismatch | None = None
    for world in list(_worlds):
        try:
            world.end_with_program(error)
        except CollectiveMismatch as found:
            mismatch = found
        except Exception:
            pass  # nobody is left to act on it
    if error is None and mismatch is not None:  # as if the program's last line had raised it
        failure_report.ended(mismatch)
        sys.excepthook(type(mismatch), mismatch.with_traceback(None), None)
        from .backend.native.channel import exit_with  # not needed by a world of another backend

        exit_with(1)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_at_exit)
