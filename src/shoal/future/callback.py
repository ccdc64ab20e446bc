"""One callback of one future."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .scope import CallbackScope, enter_scope, leave_scope
from .state import FutureState, without_frames


class Callback:
    """A callback that a user registered: its function, its index, and the future of its result.

    Args:
        high_priority: whether its streams have high priority; None: as the future's engine chose.
    """

    __slots__ = ("_child", "_fn", "_high_priority", "_index", "_turns")

    def __init__(
        self,
        fn: Callable[[Any], Any],
        index: int,
        child: FutureState[Any] | None,
        high_priority: bool | None,
    ) -> None:
        self._fn = fn
        self._index = index
        self._child = child
        self._high_priority = high_priority
        #: Ctrl-C may cause the callback to be queued twice; only the run that pops this element proceeds.
        self._turns = [1]

    def run(self, future: FutureState[Any]) -> None:
        """Call the function in its scope and complete the child.  Runs in a thread of the pool."""
        try:
            self._turns.pop()
        except IndexError:
            return
        token = enter_scope(None if future.key is None else CallbackScope(future.key, self._index))
        try:
            device = future._device
            if device is None:
                self._call(future)
            else:
                if self._child is not None:
                    self._child._device = device.successor()
                with device.streams_behind(future._payload(), self._high_priority):
                    self._call(future)
        except BaseException as error:
            if self._child is None or self._child.done():
                raise
            # The future's own error must not reference the future through the callback's frame.
            passed_on = error is future._error
            self._child.set_exception(without_frames(error, None if passed_on else 2))
        finally:
            leave_scope(token)

    def _call(self, future: FutureState[Any]) -> None:
        value = self._fn(future)
        if self._child is not None:
            # Within the callback's streams: the events of the result are recorded on them.
            self._child.set_result(value)
