"""The threads that run handlers, and the loop that runs those which are coroutines.

Handlers' threads block in the endpoint until a letter comes, which goes to one of them without a hop.  There
is one at first.  The endpoint says when a letter has waited for :data:`PATIENCE` while no thread was free:
then one more starts, because those that run are taken to be blocked, on a nested call for example; unless
letters were taken meanwhile at the pace of short calls, for which threads would only take turns.  So a
burst of short calls takes one thread, and no set of calls can deadlock for want of one.  A thread that was
added and finds nothing to do for a while ends.

A mailbox of its own has one thread, which takes its letters in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ..errors import AgentClosed

_logger = logging.getLogger("shoal")

#: seconds that a letter waits for a busy thread before one more is started
PATIENCE = 0.002
#: seconds that a further thread stays without work
_IDLE = 5.0
#: mailbox of the calls that are in no order
CALLS = 0


class Inbox(Protocol):
    """Where letters are taken from."""

    def take(self, mailbox: int, timeout: float | None, most: int) -> list[Any] | None: ...

    def open(self, mailbox: int) -> None: ...

    def release(self, mailbox: int) -> None: ...


class Executor:
    """Runs ``handle(letter)`` for every letter.

    Args:
        inbox: gives the letters; None from it ends the threads.
        handle: must not raise.
        most: how many handlers of unordered calls may run at once.
        name: of the agent, for the names of threads.
    """

    def __init__(self, inbox: Inbox, handle: Callable[[Any], None], most: int, name: str) -> None:
        self._inbox = inbox
        #: replaced when the agent closes
        self.handle = handle
        self._most = most
        self._name = name
        self._lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._serving = 0
        self._named = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to take calls."""
        self._spawn(self._serve, None)

    def grow(self) -> None:
        """A letter has waited, and no thread is free: add one, up to the limit."""
        with self._lock:
            if self._serving >= self._most:
                return
        try:
            self._spawn(self._serve, _IDLE)
        except RuntimeError:  # no more threads: those there are get to the letter later
            _logger.warning("worker %r: no thread can be started for a call that waits", self._name)

    def consume(self, mailbox: int) -> None:
        """Open ``mailbox``, and take its letters in order, in a thread of its own."""
        self._inbox.open(mailbox)
        self._spawn(self._consume, mailbox)

    def release(self, mailbox: int) -> None:
        """Nobody sends to ``mailbox`` any more: let its thread end."""
        self._inbox.release(mailbox)

    def thread_count(self) -> int:
        """How many threads there are, those of mailboxes among them."""
        return len(self._threads)

    def run_coroutine(
        self, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]
    ) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the agent's loop; ``done(task)`` is called there when it has ended.

        Returns:
            the task, which any thread may cancel.

        Raises:
            AgentClosed: the executor is closed.
        """
        with self._lock:  # the end of the loop finds every task
            if self._closed:
                coroutine.close()
                raise AgentClosed(f"worker {self._name!r}: the agent was closed before a coroutine began")
            task = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        task.add_done_callback(done)
        return task

    def close(self, timeout: float) -> bool:
        """Wait until all threads have ended, for which the inbox must have been closed; whether they have.

        A handler that calls this is not waited for.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            threads, loop = list(self._threads), self._loop
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())

    # -- threads -------------------------------------------------------------------------------

    def _spawn(self, target: Callable[[Any], None], argument: Any) -> None:
        with self._lock:
            if self._closed:
                return
            self._named += 1
            thread = threading.Thread(
                target=self._run,
                args=(target, argument),
                name=f"shoal-rpc-{self._name}-{self._named}",
                daemon=True,
            )
            self._threads.add(thread)
            self._serving += target == self._serve
        try:
            thread.start()
        except BaseException:
            self._forget(thread, target)
            raise

    def _run(self, target: Callable[[Any], None], argument: Any) -> None:
        try:
            target(argument)
        finally:
            self._forget(threading.current_thread(), target)

    def _forget(self, thread: threading.Thread, target: Callable[[Any], None]) -> None:
        with self._lock:
            self._threads.discard(thread)
            self._serving -= target == self._serve

    def _serve(self, idle: float | None) -> None:
        while letters := self._inbox.take(CALLS, idle, 1):
            self._handle(letters)

    def _consume(self, mailbox: int) -> None:
        while letters := self._inbox.take(mailbox, None, 1):
            self._handle(letters)

    def _handle(self, letters: list[Any]) -> None:
        try:
            self.handle(letters.pop())
        except BaseException:
            with contextlib.suppress(BaseException):  # of a logging handler of the user
                _logger.exception("worker %r: a call could not be answered", self._name)

    # -- the loop ------------------------------------------------------------------------------

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            try:
                self._spawn(self._turn, loop)
            except BaseException:
                loop.close()
                raise
            self._loop = loop
        return self._loop

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while True:
                try:
                    loop.run_forever()
                except BaseException:  # asyncio passes on SystemExit and KeyboardInterrupt of a task
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
