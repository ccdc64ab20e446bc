"""A wrapper of the native endpoint (``cpp/rpc``); no other module of RPC imports the core.

It adds callbacks for the end of calls and connections, which run in one thread that blocks in the endpoint,
and converts errors to exceptions of shoal.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ... import _core
from ...errors import OutOfResources, RpcError

_logger = logging.getLogger("shoal")

Call = _core.Call
CallEnd = _core.CallEnd
Message = _core.Packet
RpcEndpoint = _core.RpcEndpoint
pack = _core.pack
unpack = _core.unpack

_core.learn_tensors(torch.Tensor)


class Endpoint:
    """The endpoint of one agent, and the dispatcher: the thread that runs callbacks.

    Args:
        memory: maximum bytes of large parts that it may hold.
        heartbeat: seconds without a message after which a peer on another host is considered lost.
    """

    def __init__(self, name: str, memory: int, heartbeat: float) -> None:
        self._name = name
        try:
            self.post = _core.RpcEndpoint.make(memory, heartbeat)
        except OSError as error:
            raise OutOfResources(f"worker {name!r} cannot start: {error}") from error
        self._tickets = itertools.count(1)
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._lasting: dict[int, Callable[[], None]] = {}
        #: a heap of (time, number, callback); the functions of ``heapq`` are atomic for other threads
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._woken = self.lasting(lambda: None)
        self._dispatcher = threading.Thread(target=self._dispatch, name=f"shoal-rpc-{name}", daemon=True)
        try:
            self._dispatcher.start()
        except BaseException:
            self.post.close(0.0)
            raise

    def when(self, announce: Callable[[int], bool], fn: Callable[[], object]) -> Callable[[], object]:
        """Call ``fn()`` once when the event that ``announce(ticket)`` subscribes to has occurred.

        If it has already occurred, ``announce`` returns True and ``fn`` runs in this thread, else in the
        dispatcher's.  ``fn`` must be quick.

        Returns:
            a function that removes the callback, for events that may never occur.
        """
        ticket = next(self._tickets)
        self._callbacks[ticket] = fn
        if announce(ticket) and self._callbacks.pop(ticket, None) is not None:
            fn()
        return partial(self._callbacks.pop, ticket, None)

    def lasting(self, fn: Callable[[], None]) -> int:
        """Return a ticket for any number of ``post.announce``: each makes the dispatcher call ``fn()``."""
        ticket = next(self._tickets)
        self._lasting[ticket] = fn
        return ticket

    def after(self, seconds: float, fn: Callable[[], object]) -> None:
        """Call ``fn()`` in the dispatcher's thread after ``seconds``."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._tickets), fn))
        self.post.announce(self._woken)

    def keep(self, seconds: float, objects: object) -> None:
        """Keep references to ``objects`` for ``seconds``."""
        self.after(seconds, partial(id, objects))

    def watch(self, delay: float, fn: Callable[[], None]) -> None:
        """Call ``fn()`` each time a call has waited for ``delay`` seconds with no thread free."""
        self.post.watch(self.lasting(fn), delay)

    def memory(self) -> int:
        """Return a new file descriptor of the memory that is lent to peers; the caller must close it.

        Raises RpcError if there is none or the endpoint is closed, OutOfResources without free descriptors.
        """
        try:
            fd = self.post.memory()
        except OSError as error:
            raise OutOfResources(f"worker {self._name!r} cannot share its memory: {error}") from error
        if fd < 0:
            raise RpcError(f"worker {self._name!r} has no memory to share")
        return fd

    def attach(self, fd: int, pid: int, lost: Callable[[], None], memory: int = -1) -> int:
        """Take ownership of the connection ``fd``; call ``lost()`` once when the peer is lost or leaves.

        Args:
            memory: file descriptor of the memory that the peer lends, also owned from now on; -1: none.

        Raises:
            RpcError: the endpoint is closed, or the peer's memory cannot be used.
            OutOfResources: the process is out of file descriptors.
        """
        ticket = next(self._tickets)
        self._callbacks[ticket] = lost
        try:
            return self.post.attach(fd, pid, ticket, memory)
        except BaseException as error:
            self._callbacks.pop(ticket, None)
            if isinstance(error, ConnectionError):
                raise RpcError(f"worker {self._name!r} cannot use a connection: {error}") from error
            if isinstance(error, OSError):
                raise OutOfResources(f"worker {self._name!r} cannot use a connection: {error}") from error
            raise

    def close(self, timeout: float) -> list[int]:
        """Send the queued messages and a goodbye to each peer, and end; pending calls fail.

        Returns:
            the numbers of the connections to which not everything could be sent in time.
        """
        deadline = time.monotonic() + timeout
        late = self.post.close(timeout)
        if threading.current_thread() is not self._dispatcher:
            self._dispatcher.join(max(deadline - time.monotonic(), 0.1))
        return late

    def _dispatch(self) -> None:
        while (tickets := self.post.completions(self._until_next())) is not None:
            for ticket in tickets:
                self._run(self._callbacks.pop(ticket, None) or self._lasting.get(ticket))
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._run(heapq.heappop(self._timers)[2])
        self._timers.clear()

    def _until_next(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run(self, fn: Callable[[], object] | None) -> None:
        try:
            if fn is not None:
                fn()
        except BaseException:
            with contextlib.suppress(BaseException):  # raised by a user's logging handler
                _logger.exception("worker %r: a callback of the endpoint raised", self._name)
