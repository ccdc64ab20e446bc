"""Futures, the results of all operations.

An engine completes a :class:`Future` in one of two ways: it sets the result from any thread, or it provides a
:class:`FutureSource`, which the future queries.  A source suits operations of a microsecond: nothing is
allocated or signalled until needed, and a waiting thread may finish the operation in the engine itself.

Results on devices are complete once their work is enqueued; :mod:`shoal.streams` orders streams behind it.
"""

from .combinators import FutureAsSource, collect_all, wait_all, wait_any
from .future import Future
from .pool import pool
from .scope import CallbackScope, callback_scope, derive_key
from .state import FutureSource

__all__ = [
    "CallbackScope",
    "Future",
    "FutureAsSource",
    "FutureSource",
    "callback_scope",
    "collect_all",
    "derive_key",
    "pool",
    "wait_all",
    "wait_any",
]
