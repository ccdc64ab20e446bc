"""Futures: what every operation returns, whoever completes it and wherever its tensors lie.

There is one class, :class:`Future`.  An engine completes a future in one of two ways.  It may set the
result from any thread; or it hands over a :class:`FutureSource`, which the future asks.  The second way is
for operations of a microsecond: nothing is allocated or signalled until somebody needs it, and the
thread that waits goes straight into the engine and may finish the operation itself.

Results on devices are complete as soon as the work is enqueued; :mod:`shoal.streams` does the rest.
"""

from .combinators import Completion, collect_all, wait_all, wait_any
from .future import Future
from .pool import pool
from .scope import CallbackScope, callback_scope, derive_key, enter_scope, leave_scope, scope_variable
from .source import FutureSource

__all__ = [
    "CallbackScope",
    "Completion",
    "Future",
    "FutureSource",
    "callback_scope",
    "collect_all",
    "derive_key",
    "enter_scope",
    "leave_scope",
    "pool",
    "scope_variable",
    "wait_all",
    "wait_any",
]
