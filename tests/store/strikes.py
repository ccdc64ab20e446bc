"""What goes on beside a test: strikes at a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .conformance import in_background


@contextmanager
def again_and_again(strike: Callable[[], None], every: float) -> Iterator[list[None]]:
    """Call ``strike`` in another thread; the list has as many items as it has returned."""
    ended, struck = threading.Event(), []

    def work() -> None:
        while not ended.wait(every):
            strike()
            struck.append(None)

    with in_background() as call:
        working = call(work)
        try:
            yield struck
        finally:
            ended.set()
        working.result(60)
