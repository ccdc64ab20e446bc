"""The native endpoint (``cpp/post``) as the rest of RPC uses it; nothing else here imports the core.

It adds two things: functions that are called when something has ended (a call, a peer), by one thread that
blocks in the endpoint; and errors in shoal's own words.
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
Letter = _core.Letter
pack = _core.pack
unpack = _core.unpack

_core.learn_tensors(torch.Tensor)


class Endpoint:
    """One agent's endpoint and the thread that tells what has ended.

    Args:
        name: of the agent.
        memory: bytes of large parts that it may hold.
        heartbeat: seconds of silence after which a peer on another host counts as lost.
    """

    def __init__(self, name: str, memory: int, heartbeat: float) -> None:
        self._name = name
        try:
            self.post = _core.Post.make(memory, heartbeat)
        except OSError as error:
            raise OutOfResources(f"worker {name!r} cannot start: {error}") from error
        self._tickets = itertools.count(1)
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._lasting: dict[int, Callable[[], None]] = {}
        #: moment, a number, and what to call then; the heap's functions are one step for other threads
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._woken = self.lasting(lambda: None)
        self._dispatcher = threading.Thread(target=self._dispatch, name=f"shoal-rpc-{name}", daemon=True)
        try:
            self._dispatcher.start()
        except BaseException:
            self.post.close(0.0)
            raise

    def when(self, announce: Callable[[int], bool], fn: Callable[[], object]) -> Callable[[], object]:
        """Call ``fn()`` once when that has happened which ``announce(ticket)`` asks for; at once if it has.

        ``fn`` is quick; it runs in the dispatcher's thread, or in this one.

        Returns:
            what forgets ``fn``, if it may be that nothing ever happens.
        """
        ticket = next(self._tickets)
        self._callbacks[ticket] = fn
        if announce(ticket) and self._callbacks.pop(ticket, None) is not None:
            fn()
        return partial(self._callbacks.pop, ticket, None)

    def lasting(self, fn: Callable[[], None]) -> int:
        """A ticket for ``post.announce``, each of which makes the dispatcher call ``fn()``."""
        ticket = next(self._tickets)
        self._lasting[ticket] = fn
        return ticket

    def after(self, seconds: float, fn: Callable[[], object]) -> None:
        """Call ``fn()`` in the dispatcher's thread when ``seconds`` have passed."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._tickets), fn))
        self.post.announce(self._woken)

    def keep(self, seconds: float, objects: object) -> None:
        """Hold ``objects`` for so long."""
        self.after(seconds, partial(id, objects))

    def watch(self, patience: float, fn: Callable[[], None]) -> None:
        """Call ``fn()`` each time a call has waited for ``patience`` seconds and no thread is free."""
        self.post.watch(self.lasting(fn), patience)

    def memory(self) -> int:
        """A new descriptor of the memory that is lent to peers, for the caller to close.

        Raises:
            RpcError: there is none, or the endpoint is closed.
            OutOfResources: no descriptor is left.
        """
        try:
            fd = self.post.memory()
        except OSError as error:
            raise OutOfResources(f"worker {self._name!r} cannot share its memory: {error}") from error
        if fd < 0:
            raise RpcError(f"worker {self._name!r} has no memory to share")
        return fd

    def attach(self, fd: int, pid: int, lost: Callable[[], None], memory: int = -1) -> int:
        """Take over the connection ``fd``; ``lost()`` is called once when the peer is lost or leaves.

        Args:
            memory: the descriptor, taken over too, of what the peer lends; -1: the two share none.

        Raises:
            RpcError: the endpoint is closed, or the peer's memory cannot be used.
            OutOfResources: no descriptor is left.
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
        """Send what is queued, say goodbye and end; what is pending fails.

        Returns:
            the numbers of the connections that did not take all of it in time.
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
            with contextlib.suppress(BaseException):  # of a logging handler of the user
                _logger.exception("worker %r: could not pass on an end", self._name)
