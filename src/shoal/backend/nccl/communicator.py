"""The communicator of one group: its start, its errors and its end.

Collectives run on one stream, except those that a graph captures: a stream that takes part in a capture
cannot run anything else, so they have a second one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import GroupError
from ...spec import Operation
from ...streams import StreamRuntime
from ..engine import Communicator, Setup, Transfer
from .collectives import NcclCall, StreamCollectives
from .library import Nccl, Result

_logger = logging.getLogger("shoal")

#: NCCL forbids parallel calls for communicators of one device.  Held until NCCL's thread has put the work on
#: the stream, so that kernels of several communicators have the order of the program on every rank.
_launch_lock = threading.Lock()
#: seconds for which a launch is awaited with the lock; only connecting to other ranks takes longer
_LAUNCH_S = 1e-3
#: seconds between two looks at a communicator that other ranks join or leave
_PAUSE_S = 1e-3
#: seconds in which a communicator is finalized; afterwards it is aborted
_FINALIZE_TIMEOUT_S = 5.0
#: Maximum number of thread blocks of a kernel of callbacks.  NCCL uses up to 64, and kernels of the group's
#: other communicator must fit on the device beside them.
_CALLBACK_CTAS = 8
#: seconds in which the work of an aborted communicator ends on the device
_ABORT_TIMEOUT_S = 10.0


class NcclCommunicator(Communicator):
    """A communicator of NCCL, and its streams.

    Args:
        make_stream: returns a stream of the device.
    """

    def __init__(
        self, nccl: Nccl, setup: Setup, runtime: StreamRuntime, make_stream: Callable[[], Any]
    ) -> None:
        self._nccl, self._runtime, self._make_stream = nccl, runtime, make_stream
        self._name, self.device = setup.spec.name, setup.device
        self.rank, self.size = setup.spec.rank, len(setup.spec.ranks)
        #: Held during calls for this communicator.
        self._lock = threading.Lock()
        self._ended = False
        self._stream = make_stream()
        self._collectives = StreamCollectives(self, nccl, runtime, self._stream)
        #: Those that graphs capture; None: no graph has one.
        self._captured: StreamCollectives | None = None
        unique_id = setup.from_first(nccl.unique_id)
        with _launch_lock, runtime.use(self._stream):
            max_ctas = _CALLBACK_CTAS if setup.spec.for_callbacks else None
            self._comm = nccl.init(self.size, unique_id, self.rank, max_ctas)
        try:
            while not self.ready():
                setup.check()
                time.sleep(_PAUSE_S)
        except BaseException:
            self.abort()
            raise

    def start(self, operation: Operation) -> Transfer:
        if not operation.captured:
            return self._collectives.start(operation)
        if self._captured is None:
            self._captured = StreamCollectives(self, self._nccl, self._runtime, self._make_stream())
        return self._captured.start(operation)

    def launch(self, calls: Sequence[NcclCall], stream: int) -> None:
        """Call NCCL, several functions as one group; wait for a moment until the work is on the stream."""
        nccl = self._nccl
        # NCCL makes the device current in a thread of its own; the kernel of an average on one rank is
        # launched in this thread.
        current = self._runtime.use(self._stream) if self.size == 1 else contextlib.nullcontext()
        with current, _launch_lock, self._lock:
            if self._ended:
                raise GroupError("the communicator was aborted")
            if len(calls) == 1:
                function, arguments = calls[0]
                function(*arguments, self._comm, stream)
            elif calls:
                nccl.group_start()
                try:
                    for function, arguments in calls:
                        function(*arguments, self._comm, stream)
                finally:
                    nccl.group_end()
            end = time.monotonic() + _LAUNCH_S
            while not self._is_ready() and time.monotonic() < end:
                os.sched_yield()

    def ready(self) -> bool:
        """Whether all calls for the communicator are carried out, so that their work is on the stream.

        Raises:
            GroupError: the communicator has failed.
        """
        with self._lock:
            return self._is_ready()

    def _is_ready(self) -> bool:
        if self._ended:
            raise GroupError("the communicator was aborted")
        state = self._nccl.async_error(self._comm)
        if state == Result.IN_PROGRESS:
            return False
        if state != Result.SUCCESS:
            details = self._nccl.last_error(self._comm).strip()
            raise GroupError(self._nccl.error_string(state) + (f"; {details}" if details else ""))
        return True

    def abort(self) -> bool:
        # A thread that holds the lock for so long hangs in NCCL, and is freed by the call.
        locked = self._lock.acquire(timeout=_ABORT_TIMEOUT_S)
        ended, self._ended = self._ended, True
        if locked:
            self._lock.release()  # NCCL waits for the release of graphs; other calls raise meanwhile
        with self._runtime.use(self._stream):
            if not ended:
                self._nccl.abort(self._comm)
            event = self._runtime.record(self._stream)
        return self._runtime.synchronize(event, _ABORT_TIMEOUT_S)

    def close(self) -> None:
        deadline = time.monotonic() + _FINALIZE_TIMEOUT_S
        try:
            self._await_ready(deadline)
            with _launch_lock, self._lock, self._runtime.use(self._stream):
                self._nccl.finalize(self._comm)
            self._await_ready(deadline)
        except Exception as error:  # NCCL cannot end it in good order
            if self._captured is not None and isinstance(error, TimeoutError):
                # NCCL waits for the release of graphs, also in an abort.
                _logger.warning(
                    "group %r on rank %d is closed, but graphs that captured its collectives exist, so "
                    "its NCCL communicator is kept until the process ends; release the graphs first",
                    self._name, self.rank,
                )  # fmt: skip
                return
            self.abort()
            return
        with self._lock, self._runtime.use(self._stream):
            self._ended = True
            self._nccl.destroy(self._comm)

    def _await_ready(self, deadline: float) -> None:
        while not self.ready():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_PAUSE_S)
