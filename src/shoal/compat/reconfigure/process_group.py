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
    """A group whose members ``torch.distributed._reconfigure`` replaces.

    It has no members before the first reconfigure.  An operation that is issued while a reconfigure is in
    progress waits for it, and raises its error if it fails.  ``rank()`` and ``size()`` change when a
    reconfigure has succeeded.
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
        """The reconfigurer keeps it."""

    @property
    def group(self) -> ProcessGroup:  # type: ignore[override] # it changes
        """The present :class:`shoal.ProcessGroup`; waits for a reconfigure that is in progress."""
        return self._reconfigurer.group()

    @property
    def _shown(self) -> Shown:
        current = self._reconfigurer.current
        return Shown(current.rank, current.size)

    # C++ asks for these two, and Python through C++.

    def getRank(self) -> int:
        """The rank of this process."""
        return self._reconfigurer.current.rank

    def getSize(self) -> int:
        """The number of members."""
        return self._reconfigurer.current.size

    def get_error(self) -> ErrorType:
        """How the present group failed; as with Gloo, ``SUCCESS`` also after :meth:`abort`."""
        current = self._reconfigurer.current
        failure = current._channel.failure() if isinstance(current, ProcessGroup) else None
        if failure is None or current.state != "broken":
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if isinstance(failure, OperationTimeout) else ErrorType.COMM_ERROR

    def get_reconfigure_handle(self) -> str:
        """The handle of this process for the next reconfigure."""
        return self._reconfigurer.handle().encode()

    def reconfigure(self, opts: Any) -> TorchWork:
        """Make a group of the processes whose handles are in ``opts.handles``; returns at once.

        Args:
            opts: torch's ``ReconfigureOptions``; ``hints`` are not used.
        """
        limit = self._seconds if opts.timeout is None else opts.timeout.total_seconds()
        future = self._reconfigurer.begin(opts.uuid, opts.handles, limit, self._seconds)
        return TorchWork(future, [])

    def shutdown(self) -> None:
        """Release everything.  Never hangs."""
        self._reconfigurer.close()

    def abort(self) -> None:
        """End the present group on all ranks; a reconfigure can follow."""
        self._reconfigurer.abort()
