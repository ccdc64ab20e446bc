"""The thread pool for the callbacks of futures, and the groups of threads of this and other pools.

Callbacks never run on the thread that completes a future (often an engine's only progress thread), since a
callback that waits for another operation would block its progress.  The pool of daemon threads has no upper
limit, because any number of callbacks may block on one another.

A few callbacks run at once.  While more are queued, a spare thread waits; if no callback starts for a moment,
it takes the running ones to be blocked and runs one more.  So a thousand short callbacks need a handful of
threads, a thousand blocking ones need a thousand, and callbacks cannot deadlock for lack of a thread.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..common.deadline import Deadline

_logger = logging.getLogger("shoal")

Job = Callable[[], None]

#: seconds after which an idle thread ends
IDLE_TIMEOUT_S = 5.0
#: seconds in which no queued job starts, after which another thread is added
STALL_TIMEOUT_S = 0.002
#: number of callbacks that run at once while none is considered blocked
_MAX_UNBLOCKED = 4


class ThreadGroup:
    """Daemon threads, tracked until they end.

    Args:
        name: prefix of their names.
        lock: held while a thread is added; a thread that decides under it to end may call :meth:`discard`.
    """

    def __init__(self, name: str, lock: threading.RLock) -> None:
        self._name = name
        self._lock = lock
        self._threads: set[threading.Thread] = set()
        self._ending: set[threading.Thread] = set()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, target: Callable[..., None], *args: Any) -> None:
        """Run ``target(*args)`` in a new thread; raise RuntimeError if the system has no more threads."""
        with self._lock:
            name = f"{self._name}-{next(self._numbers)}"
            thread = threading.Thread(target=self._run, args=(target, *args), name=name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                if thread.ident is None:
                    self._threads.discard(thread)
                raise

    def discard(self) -> None:
        """Stop counting the calling thread, which ends."""
        with self._lock:
            self._threads.discard(threading.current_thread())
            self._ending = {thread for thread in self._ending if thread.is_alive()}
            self._ending.add(threading.current_thread())

    def join(self, timeout: float) -> bool:
        """Wait until all threads but the calling one have ended; return whether they have."""
        deadline = Deadline(timeout)
        while True:
            with self._lock:  # the last jobs may have started further threads
                threads = {thread for thread in self._threads | self._ending if thread.is_alive()}
            threads.discard(threading.current_thread())
            if not threads:
                return True
            thread = threads.pop()
            thread.join(deadline.remaining())
            if thread.is_alive():
                return False

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        try:
            target(*args)
        finally:
            self.discard()


class CallbackPool:
    """A thread pool for callbacks that grows when they block."""

    def __init__(self) -> None:
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Reset the pool, as a forked child must: it has neither the threads nor the owner of the lock."""
        # Also used by futures.  Re-entrant, because a finalizer run by the garbage collector in a critical
        # section may complete a future or submit a job.
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)
        self._queue: deque[Job] = deque()
        self._threads = ThreadGroup("shoal-callback", self.lock)
        self._running = 0
        self._started = 0
        self._closing = False

    def submit(self, job: Job) -> None:
        """Queue ``job``; jobs start in the order of submission."""
        with self._condition:
            self._queue.append(job)
            if len(self._threads) > self._running:
                self._condition.notify()
            else:
                self._spawn()

    def shutdown(self, timeout: float = 10.0) -> bool:
        """End all threads after the queued jobs; the next ``submit`` starts new ones.

        Returns:
            False if a thread was still busy after ``timeout`` seconds.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        ended = self._threads.join(timeout)
        self._closing = False
        return ended

    def _spawn(self) -> None:
        try:
            self._threads.start(self._work)
        except RuntimeError:
            if not self._threads:  # otherwise an existing thread runs the job later
                raise

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job()
            except BaseException:
                with contextlib.suppress(BaseException):  # raised by a user's logging handler
                    _logger.exception("a callback of a future failed")
            # Objects that the job references must not be kept alive until the next job.
            del job
            with self._condition:
                self._running -= 1

    def _take(self) -> Job | None:
        """The next job, or None when this thread must end."""
        with self._condition:
            stalled = False
            while not (self._queue and (self._running < _MAX_UNBLOCKED or stalled)):
                if self._closing and not self._queue:
                    self._threads.discard()
                    return None
                started = self._started
                if not self._condition.wait(STALL_TIMEOUT_S if self._queue else IDLE_TIMEOUT_S):
                    if not self._queue:
                        self._threads.discard()
                        return None
                    stalled = started == self._started
            self._running += 1
            self._started += 1
            job = self._queue.popleft()
            if self._queue and len(self._threads) == self._running:
                self._spawn()
            return job


#: The pool of this process.
pool = CallbackPool()
os.register_at_fork(after_in_child=pool.reset_after_fork)


@atexit.register
def _end() -> None:
    """Give callbacks 0.5 s to finish before the interpreter exits.

    Python ends a daemon thread at its next request for the GIL.  If that is in a ``noexcept`` function of
    torch's C++, the process aborts.
    """
    pool.shutdown(timeout=0.5)
