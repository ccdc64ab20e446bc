"""The process group of ``init_process_group("shoal", enable_reconfigure=True)``, from torch 2.14 on."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ErrorType, Store

from ...common.uncompiled import uncompiled
from ...errors import OperationTimeout
from ...group import ProcessGroup
from ..process_group import TorchProcessGroup
from ..shown import Shown
from ..work import TorchWork
from .reconfigurer import Reconfigurer


@uncompiled
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
    def _shown(self) -> Shown:
        current = self._reconfigurer.current
        return Shown(current.rank, current.size)

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

    def abort(self) -> None:
        """Abort the current group on all ranks; it can be reconfigured afterwards."""
        self._reconfigurer.abort()
