"""The thread pool for the callbacks of futures.

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
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

_logger = logging.getLogger("shoal")

Job = Callable[[], None]


class CallbackPool:
    """A thread pool for callbacks that grows when they block.

    Args:
        eager: number of jobs that run at once while none is taken to be blocked.
        idle_seconds: time after which an idle thread ends.
        stall_seconds: time in which no queued job starts after which another thread runs one.
    """

    def __init__(self, eager: int = 4, idle_seconds: float = 5.0, stall_seconds: float = 0.002) -> None:
        self._eager = eager
        self._idle_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self.forget()

    def forget(self) -> None:
        """Reset the pool, as a forked child must: it has neither the threads nor the owner of the lock."""
        # Also used by futures.  Re-entrant, because a finalizer run by the garbage collector in a critical
        # section may complete a future or submit a job.
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)
        self._queue: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._running = 0
        self._started = 0
        self._named = 0
        self._closing = False

    def submit(self, job: Job) -> None:
        """Queue ``job``; jobs start in the order of submission."""
        with self._condition:
            self._queue.append(job)
            if len(self._threads) > self._running:
                self._condition.notify()
            else:
                self._spawn()

    def thread_count(self) -> int:
        """The current number of threads."""
        return len(self._threads)

    def shutdown(self, timeout: float = 10.0) -> bool:
        """End all threads after the queued jobs; the next ``submit`` starts new ones.

        Returns:
            False if a thread was still busy after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            self._closing = True
            threads = list(self._threads)
            self._condition.notify_all()
        while threads:
            threads[0].join(max(0.0, deadline - time.monotonic()))
            if threads[0].is_alive():
                break
            threads = threads[1:]
            if not threads:
                with self._condition:  # the last jobs may have started further threads
                    threads = list(self._threads)
        self._closing = False
        return not threads

    def _spawn(self) -> None:
        self._named += 1
        thread = threading.Thread(target=self._work, name=f"shoal-callback-{self._named}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException as error:
            if thread.ident is None:
                self._threads.discard(thread)
            # If the system has no more threads, an existing one runs the job later.
            if not isinstance(error, RuntimeError) or not self._threads:
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
            while not (self._queue and (self._running < self._eager or stalled)):
                if self._closing and not self._queue:
                    self._threads.discard(threading.current_thread())
                    return None
                started = self._started
                if not self._condition.wait(self._stall_seconds if self._queue else self._idle_seconds):
                    if not self._queue:
                        self._threads.discard(threading.current_thread())
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
os.register_at_fork(after_in_child=pool.forget)


@atexit.register
def _end() -> None:
    """Give callbacks 0.5 s to finish before the interpreter exits.

    Python ends a daemon thread at its next request for the GIL.  If that is in a ``noexcept`` function of
    torch's C++, the process aborts.
    """
    pool.shutdown(timeout=0.5)
