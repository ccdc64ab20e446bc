"""The threads on which the callbacks of futures run.

Callbacks never run on the thread that completes a future (often an engine's only progress thread):
a callback that waits for a further operation would wait for itself.  They run in a pool of daemon
threads without an upper limit, because any number of them may block on one another.

The pool lets a few callbacks run at once.  While more are queued, a spare thread watches; if nothing
was started for a moment, those running are taken to be blocked, and the spare thread runs one more.
So a burst of a thousand short callbacks takes a handful of threads, a thousand that block take a
thousand, and no set of callbacks can deadlock for want of a thread.
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
    """Threads that run callbacks: a few at once, more as soon as those block.

    Args:
        eager: how many jobs run at once before any of them counts as blocked.
        idle_seconds: how long a thread without work stays.
        stall_seconds: how long nothing may start, with jobs queued, until one more thread takes part.
    """

    def __init__(self, eager: int = 4, idle_seconds: float = 5.0, stall_seconds: float = 0.002) -> None:
        self._eager = eager
        self._idle_seconds = idle_seconds
        self._stall_seconds = stall_seconds
        self.forget()

    def forget(self) -> None:
        """Start afresh, as a forked child must: it has neither the threads nor the owner of the lock."""
        # Futures use it too.  Re-entrant: a finalizer that the garbage collector runs in a critical
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
        """Queue ``job``; jobs are taken up in the order in which they were submitted."""
        with self._condition:
            self._queue.append(job)
            if len(self._threads) > self._running:
                self._condition.notify()
            else:
                self._spawn()

    def thread_count(self) -> int:
        """How many threads the pool has now."""
        return len(self._threads)

    def shutdown(self, timeout: float = 10.0) -> bool:
        """End all threads after the jobs they have; the next ``submit`` starts new ones.

        Returns:
            False if some thread was still busy after ``timeout`` seconds.
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
            # When the system is out of threads, those there are get to the job later.
            if not isinstance(error, RuntimeError) or not self._threads:
                raise

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job()
            except BaseException:
                with contextlib.suppress(BaseException):  # of a logging handler of the user
                    _logger.exception("a callback of a future failed")
            # What the job refers to must not live until the next one comes.
            del job
            with self._condition:
                self._running -= 1

    def _take(self) -> Job | None:
        """The next job, or None when this thread is to end."""
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
    """Let callbacks finish before the interpreter goes away.

    Python ends a daemon thread where it next asks for the GIL.  If that is in torch's C++, which holds no
    exceptions to be possible there, the process aborts.  A callback that blocks is not waited for.
    """
    pool.shutdown(timeout=0.5)
