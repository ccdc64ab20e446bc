"""The end of an agent that closes gracefully: it finishes what is there, and others cannot hold it up.

Calls that are served or queued when the agent begins to close are answered, and its own are waited for.
Those that come meanwhile are served as long as these take.  Afterwards only what runs is finished: a call
that has not begun is refused, or else callers that go on calling would use up all the time that there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..net import Deadline
from .calls.current import served_by
from .connection.post import Letter

#: seconds between looks at what is left
_PAUSE = 0.005


def finish(agent: Any, deadline: Deadline) -> None:
    """Wait until what is pending, served and queued at an agent has ended, or time is up."""
    post, service, executor = agent.endpoint.post, agent.service, agent.executor
    mine = served_by(agent)  # a handler that closes its agent does not wait for itself

    def served(begun: bool) -> set[tuple[int, int]]:
        all = {(peer, call) for peer, call, _, seconds in post.handled() if not begun or seconds is not None}
        return all - {mine}

    def made() -> set[tuple[int, int]]:
        return {(peer, call) for peer, call, *_ in post.pending()}

    def wait_while(unfinished: Callable[[], object]) -> None:
        while unfinished() and not deadline.expired:
            time.sleep(_PAUSE)

    def handle(letter: Letter) -> None:
        service.handle(letter)
        handled.append(letter.call)

    def queued() -> int:
        letters: int = post.stats()["letters"]  # posts among them, of which nothing else tells
        return letters

    handled: list[int] = []
    executor.handle = handle
    letters, there, own = queued(), served(begun=False), made()
    wait_while(lambda: there & served(begun=False) or own & made() or (len(handled) < letters and queued()))
    executor.handle = service.refuse
    running = served(begun=True)
    wait_while(lambda: running & served(begun=True))
