"""The threads that run handlers, and the event loop for handlers that are coroutines.

Threads of unordered calls block in the endpoint, which hands each message directly to one of them.  At first
there is one thread.  When a message has waited for 2 ms (``STALL_TIMEOUT_S``) with no thread free, the
endpoint reports it and another thread starts: the running ones are probably blocked, for example in a nested
call.  No thread is added while messages are taken at the rate of short calls.  So a burst of short calls uses
one thread, and no set of calls can deadlock for lack of threads.  An added thread ends after it has been idle
for a while.

Each ordered mailbox has one thread, which takes its messages in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ..common.deadline import Deadline
from ..errors import AgentClosed
from ..future.pool import IDLE_TIMEOUT_S, ThreadGroup
from .connection.endpoint import RpcEndpoint

_logger = logging.getLogger("shoal")

#: mailbox of unordered calls
CALLS = 0


class Executor:
    """Runs ``handle(message)`` for every message.

    Args:
        inbox: the native endpoint; when its ``take`` returns None the threads end.
        handle: must not raise.
        most: maximum number of handlers of unordered calls that run at once.
        name: of the agent, for the names of threads.
    """

    def __init__(self, inbox: RpcEndpoint, handle: Callable[[Any], None], most: int, name: str) -> None:
        self._inbox = inbox
        #: replaced when the agent closes
        self.handle = handle
        self._most = most
        self._name = name
        self._lock = threading.RLock()
        self._call_threads = ThreadGroup(f"shoal-rpc-{name}", self._lock)
        self._other_threads = ThreadGroup(f"shoal-rpc-{name}-ordered", self._lock)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the first thread."""
        self._spawn(self._call_threads, self._serve, CALLS, None)

    def add_thread(self) -> None:
        """Add a thread, up to the limit: a message has waited and no thread is free."""
        if len(self._call_threads) >= self._most:
            return
        try:
            self._spawn(self._call_threads, self._serve, CALLS, IDLE_TIMEOUT_S)
        except RuntimeError:  # no more threads: an existing one takes the message later
            _logger.warning("worker %r: cannot start another thread for a waiting call", self._name)

    def start_mailbox(self, mailbox: int) -> None:
        """Open ``mailbox``, and handle its messages in order in a separate thread."""
        self._inbox.open(mailbox)
        self._spawn(self._other_threads, self._serve, mailbox, None)

    def release(self, mailbox: int) -> None:
        """End the thread of ``mailbox``, to which no worker sends any more."""
        self._inbox.release(mailbox)

    def thread_count(self) -> int:
        """Return the number of threads, including those of mailboxes."""
        return len(self._call_threads) + len(self._other_threads)

    def run_coroutine(
        self, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]
    ) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the agent's event loop; ``done(task)`` is called there when it has ended.

        Returns:
            a future whose ``cancel()`` may be called from any thread.

        Raises:
            AgentClosed: the executor is closed.
        """
        with self._lock:  # so that the task exists before the loop is stopped
            if self._closed:
                coroutine.close()
                raise AgentClosed(f"worker {self._name!r}: the agent was closed before a coroutine began")
            task = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        task.add_done_callback(done)
        return task

    def close(self, timeout: float) -> bool:
        """Wait until all threads but the calling one have ended; return whether they have.

        The inbox must have been closed.
        """
        deadline = Deadline(timeout)
        with self._lock:
            self._closed = True
            loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        ended = self._call_threads.join(deadline.remaining())
        return self._other_threads.join(deadline.remaining()) and ended

    # -- threads -------------------------------------------------------------------------------

    def _spawn(self, threads: ThreadGroup, target: Callable[..., None], *args: Any) -> None:
        with self._lock:
            if not self._closed:
                threads.start(target, *args)

    def _serve(self, mailbox: int, idle: float | None) -> None:
        while messages := self._inbox.take(mailbox, idle, 1):
            try:
                self.handle(messages.pop())
            except BaseException:
                with contextlib.suppress(BaseException):  # raised by a user's logging handler
                    _logger.exception("worker %r: a call could not be answered", self._name)

    # -- the loop ------------------------------------------------------------------------------

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            try:
                self._spawn(self._other_threads, self._run_loop, loop)
            except BaseException:
                loop.close()
                raise
            self._loop = loop
        return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while True:
                try:
                    loop.run_forever()
                except BaseException:  # asyncio re-raises SystemExit and KeyboardInterrupt of a task
                    if not self._closed:
                        continue
                break
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
