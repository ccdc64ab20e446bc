"""The process group of ``init_process_group("shoal", enable_reconfigure=True)``, from torch 2.14 on.

Each call of ``torch.distributed._reconfigure`` runs a :class:`~.reconfiguration.Reconfiguration` in a
callback thread.  When it has connected the members, its group becomes the current one.  The connections
remain, also if a later attempt fails, until the process gets new ones.

A handle offers these connections only if they can be reused safely: see ``Connections.unsafe_member``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import msgspec
from torch._C._distributed_c10d import ErrorType, Store

from ... import failure_report
from ...common.never_compile import never_compile
from ...common.process_identity import ProcessIdentity
from ...errors import OperationTimeout, RendezvousError, ShoalError, UsageError, WaitTimeout
from ...future import Future, callback_scope
from ...group import ProcessGroup
from ...group.submission import run_in_callback_thread
from ...net import Deadline
from ...torch_terms.arguments import CLOSE_TIMEOUT_S
from ..process_group import TorchProcessGroup
from ..routing import DispatchNotifier
from ..work import TorchWork, settle_dropped_works
from .handles import GroupHandle, members
from .reconfiguration import Connections, Reconfiguration, Settings

#: timeout, in seconds, of completing the operations of the previous group, which its members have left
_DRAIN_TIMEOUT_S = 1.0
#: minimum time for closing, in seconds
_MIN_CLOSE_TIMEOUT_S = 1.0
#: maximum wait for attempts at interpreter exit, in seconds
_EXIT_TIMEOUT_S = 1.0


@never_compile
class ReconfigurableProcessGroup(TorchProcessGroup):
    """A group with members that ``torch.distributed._reconfigure`` replaces.

    It has no members before the first reconfiguration.  An operation that is issued during a reconfiguration
    waits for it, and raises its error if it fails.  ``rank()`` and ``size()`` change when a reconfiguration
    has succeeded.
    """

    supports_reconfigure = True

    def __init__(self, reconfigurer: Reconfigurer, store: Store, timeout: timedelta) -> None:
        """Wrap a reconfigurer; torch.distributed calls this."""
        self._reconfigurer = reconfigurer
        current: Any = reconfigurer.current
        super().__init__(current, store, timeout)
        dropped = weakref.finalize(self, reconfigurer.close_in_background)
        dropped.atexit = False

    def _use(self, group: ProcessGroup) -> None:
        """Do nothing: the reconfigurer holds the group."""

    @property
    def group(self) -> ProcessGroup:  # type: ignore[override] # it changes
        """The current :class:`shoal.ProcessGroup`, after a reconfiguration in progress has completed."""
        return self._reconfigurer.group()

    @property
    def _dispatch_notifier(self) -> DispatchNotifier:
        current = self._reconfigurer.current
        return DispatchNotifier(current.rank, current.size)

    # C++ calls these two, and so does Python through C++.

    def getRank(self) -> int:
        """Return the rank of this process."""
        return self._reconfigurer.current.rank

    def getSize(self) -> int:
        """Return the number of members."""
        return self._reconfigurer.current.size

    def get_error(self) -> ErrorType:
        """Return the failure of the current group; as with Gloo, ``SUCCESS`` also after :meth:`abort`."""
        current = self._reconfigurer.current
        failure = current._channel.failure() if isinstance(current, ProcessGroup) else None
        if failure is None or current.state != "broken":
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if isinstance(failure, OperationTimeout) else ErrorType.COMM_ERROR

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this process for the next reconfiguration."""
        return self._reconfigurer.handle().encode()

    def reconfigure(self, opts: Any) -> TorchWork:
        """Start creating a group of the processes with ``opts.handles``; returns immediately.

        Args:
            opts: torch's ``ReconfigureOptions``; ``hints`` are ignored.
        """
        limit = self._seconds if opts.timeout is None else opts.timeout.total_seconds()
        future = self._reconfigurer.begin(opts.uuid, opts.handles, limit, self._seconds)
        return TorchWork(future, [])

    def shutdown(self) -> None:
        """Release all resources.  Never hangs."""
        self._reconfigurer.close()
        settle_dropped_works()

    def abort(self) -> None:
        """Abort the current group on all ranks; it can be reconfigured afterwards."""
        self._reconfigurer.abort()


class Unconfigured:
    """A placeholder for a missing group: every operation raises; ``why`` is the end of a sentence."""

    def __init__(self, rank: int, size: int, name: str, why: str) -> None:
        self.rank, self.size, self.name, self._why = rank, size, name, why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(f"{name} on rank {self.rank} of group {self.name!r}: {self._why}")


class Reconfigurer:
    """The successive groups of one process.

    Torch shows ``rank`` and ``size`` before the first reconfiguration.  ``current`` is the current group,
    without waiting for a reconfiguration in progress.
    """

    def __init__(self, settings: Settings, rank: int, size: int) -> None:
        self._settings = settings
        self._name = settings.name
        me = ProcessIdentity.current()
        self._mine = GroupHandle(me.machine, me.process, secrets.token_hex(8), rank)
        self._lock = threading.Lock()
        self._connections: Connections | None = None
        self._attempt: Reconfiguration | None = None
        self._used: set[int] = set()
        #: running attempts and closings of groups
        self._background: list[Future[None]] = []
        self._closed = False
        self.current: ProcessGroup | Unconfigured = Unconfigured(
            rank, size, self._name, "it has no members before the first torch.distributed._reconfigure"
        )
        _living.add(self)

    # -- called by the process group -----------------------------------------------------------

    def group(self) -> ProcessGroup:
        """Wait for a reconfiguration in progress and return the current group.

        Raises ShoalError if the reconfiguration failed.
        """
        while (attempt := self._attempt) is not None:
            attempt.future.wait()
        return cast(ProcessGroup, self.current)  # an Unconfigured raises when it is used

    def handle(self) -> GroupHandle:
        """Return the current handle of this process."""
        connections = self._connections
        if connections is None or connections.unsafe_member() is not None:
            return self._mine
        return msgspec.structs.replace(
            self._mine,
            world=connections.ident,
            place=connections.base.rank,
            lost=tuple(sorted(connections.lost())),
        )

    def begin(self, uuid: int, handles: object, limit: float, timeout: float) -> Future[None]:
        """Start creating a group of the processes of ``handles``, and close the current group.

        ``limit`` is for connecting all members, ``timeout`` for operations in the new group, in seconds.
        Raises UsageError if an argument is invalid; the current group is unchanged.
        """
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"reconfigure: the process group {self._name!r} was shut down, or this process is a "
                    "forked child of its owner"
                )
            if uuid in self._used:
                raise UsageError(
                    f"reconfigure: the uuid {uuid} was already used by this process; each reconfigure "
                    "needs a new one"
                )
            world = None if self._connections is None else self._connections.ident
            found = members(handles, self._mine, world)
            rank = [each.ident for each in found].index(self._mine.ident)
            self._used.add(uuid)
            earlier, before = self._attempt, self.current
            attempt = Reconfiguration(
                self._settings, uuid, found, rank, self._connections, Deadline(limit), timeout
            )
            self.current = Unconfigured(before.rank, before.size, self._name, "it is being reconfigured")
            self._attempt = attempt
        if earlier is not None:
            earlier.cancel(f"called reconfigure again, with uuid {uuid}")
        if isinstance(before, ProcessGroup):
            self._close_later(before, timeout=_DRAIN_TIMEOUT_S)
        self._start(lambda: self._run(attempt))
        return attempt.future

    def abort(self) -> None:
        """Abort the current group, and cancel a reconfiguration in progress."""
        attempt, current = self._attempt, self.current
        if attempt is not None:
            attempt.cancel("aborted the process group")
        if isinstance(current, ProcessGroup):
            current.abort("the torch.distributed group was aborted")

    def close(self) -> None:
        """Release all resources.  Idempotent; never hangs."""
        with self._lock:
            self._closed = True
            attempt, current, connections = self._attempt, self.current, self._connections
            self._connections = None
        if attempt is not None:
            attempt.cancel("shut the process group down")
        deadline = Deadline(CLOSE_TIMEOUT_S)
        try:
            if isinstance(current, ProcessGroup):
                current.close(CLOSE_TIMEOUT_S)
        finally:
            if connections is not None:
                connections.base.close(max(deadline.remaining(), _MIN_CLOSE_TIMEOUT_S))
            while (
                under_way := [each for each in self._background if not each.done()]
            ) and not deadline.expired:
                with contextlib.suppress(WaitTimeout):
                    under_way[0].wait(max(deadline.remaining(), _MIN_CLOSE_TIMEOUT_S))

    def close_in_background(self) -> None:
        """Call :meth:`close` in a thread, for a finalizer."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # no new threads at exit: the process closes it
                threading.Thread(target=self.close, name="shoal-dropped", daemon=True).start()

    # -- background threads --------------------------------------------------------------------

    def _start(self, body: Callable[[], None]) -> None:
        with self._lock:
            self._background = [future for future in self._background if not future.done()]
            self._background.append(run_in_callback_thread(body))

    def _close_later(self, *groups: ProcessGroup, timeout: float = CLOSE_TIMEOUT_S) -> None:
        def close() -> None:
            for group in groups:
                with contextlib.suppress(Exception):
                    group.close(timeout)
            if not self._closed:
                failure_report.rebuilt()  # closing them was not a failure of this rank

        self._start(close)

    def _run(self, attempt: Reconfiguration) -> None:
        token = callback_scope.set(None)  # number operations as outside of callbacks
        failure: BaseException | None = None
        try:
            self._adopt_group(attempt, *attempt.connect())
        except ShoalError as error:
            failure = attempt.with_members_named(error)
        except BaseException as error:
            failure = error
        finally:
            failure_report.rebuilt()  # this rank continues, also after a failed attempt
            callback_scope.reset(token)
        if failure is None:
            attempt.future.set_result(None)
        else:
            self._record_failure(attempt, failure)
            attempt.future.set_exception(failure)

    def _adopt_group(self, attempt: Reconfiguration, group: ProcessGroup, connections: Connections) -> None:
        """Make the new group the current one, unless the attempt was cancelled."""
        with self._lock:
            late = self._attempt is not attempt or self._closed
            before = self._connections
            if not late:
                group._warns_of_gradients = False
                self._attempt, self.current, self._connections = None, group, connections
        unused = [group] if late else []
        if connections is not before:
            unused += [each.base for each in (connections if late else before,) if each is not None]
        if unused:
            self._close_later(*unused)
        if late:
            raise RendezvousError("this process continued without it")

    def _record_failure(self, attempt: Reconfiguration, error: BaseException) -> None:
        with self._lock:
            if self._attempt is attempt:
                was = self.current
                why = f"there is no group, because the last reconfigure failed: {error}"
                self._attempt, self.current = None, Unconfigured(was.rank, was.size, self._name, why)


_living: weakref.WeakSet[Reconfigurer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Reset the state in a forked child, which has neither its parent's threads nor its groups."""
    for each in list(_living):
        each._lock = threading.Lock()
        each._background = []
        each._closed = True
        if each._attempt is not None:
            each._attempt = None
            was = each.current
            each.current = Unconfigured(was.rank, was.size, each._name, "it was forked while it reconfigured")


@atexit.register
def _end_attempts() -> None:
    """Cancel attempts in progress, so that no thread is in torch's C++ when the interpreter exits."""
    attempts = [attempt for each in list(_living) if (attempt := each._attempt) is not None]
    for attempt in attempts:
        attempt.cancel("ended")
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for attempt in attempts:
        with contextlib.suppress(Exception):
            attempt.future.wait(max(deadline - time.monotonic(), 0.01))


os.register_at_fork(after_in_child=_after_fork_in_child)
