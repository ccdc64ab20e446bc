"""The graceful close of an agent.

1. Answer the calls that are served or queued when the close begins, and wait for the agent's own calls.
   New calls are served meanwhile.
2. Then finish only the running handlers and refuse calls that have not begun.  Otherwise callers that keep
   calling would delay the close until its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..net import Deadline
from .calls.current import served_by
from .connection.post import Letter

#: seconds between two polls for unfinished calls
_POLL_INTERVAL_S = 0.005


def finish(agent: Any, deadline: Deadline) -> None:
    """Wait until the pending, served and queued calls of an agent have completed, or the deadline expires."""
    post, service, executor = agent.endpoint.post, agent.service, agent.executor
    mine = served_by(agent)  # a handler that closes its agent does not wait for itself

    def served(begun: bool) -> set[tuple[int, int]]:
        all = {(peer, call) for peer, call, _, seconds in post.handled() if not begun or seconds is not None}
        return all - {mine}

    def made() -> set[tuple[int, int]]:
        return {(peer, call) for peer, call, *_ in post.pending()}

    def wait_while(unfinished: Callable[[], object]) -> None:
        while unfinished() and not deadline.expired:
            time.sleep(_POLL_INTERVAL_S)

    def handle(letter: Letter) -> None:
        service.handle(letter)
        handled.append(letter.call)

    def queued() -> int:
        letters: int = post.stats()["letters"]  # includes posts, which are counted nowhere else
        return letters

    handled: list[int] = []
    executor.handle = handle
    letters, there, own = queued(), served(begun=False), made()
    wait_while(lambda: there & served(begun=False) or own & made() or (len(handled) < letters and queued()))
    executor.handle = service.refuse
    running = served(begun=True)
    wait_while(lambda: running & served(begun=True))
