"""Groups are made while the world is being closed: whoever loses is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from shoal.errors import GroupClosed
from shoal.future import FutureSource
from shoal.group import ProcessGroup
from shoal.testing import run_threads

pytestmark = pytest.mark.concurrency


def _race(group: ProcessGroup, make: Callable[[ProcessGroup], ProcessGroup], delay: float) -> list[str]:
    """Make groups until the world, which this thread closes, does not let us; what ended it."""
    ends: list[str] = []
    made: list[ProcessGroup] = []
    started = threading.Event()

    def work() -> None:
        try:
            while True:
                made.append(make(group))
                started.set()
        except BaseException as error:  # compared by the test
            ends.append(type(error).__name__)
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(20)
    time.sleep(delay)
    group.close(20)
    thread.join(30)
    group.world.close(20)  # all that were made
    if thread.is_alive():
        ends.append("it hangs")
    return ends


@pytest.mark.parametrize("trial", range(12))
@pytest.mark.parametrize("form", ["split", "subgroup"])
def test_making_a_group_while_the_world_closes_ends_with_group_closed(form: str, trial: int) -> None:
    rng = random.Random(trial)
    delays = [rng.choice((0.0, rng.random() * 0.01)) for _ in range(2)]

    def make(group: ProcessGroup) -> ProcessGroup:
        part = group.split(0) if form == "split" else group.subgroup([0, 1])
        assert part is not None
        return part

    def rank(group: ProcessGroup) -> list[str]:
        return _race(group, make, delays[group.rank])

    assert run_threads(rank, 2, timeout=60) == [[GroupClosed.__name__]] * 2


def _pending_operation(group: ProcessGroup) -> FutureSource:
    """Of an operation that completes when the other rank sends something."""
    source = group.recv(None, 1)._source
    assert source is not None
    message = source._future._source  # type: ignore[attr-defined]  # below what makes a message of it
    assert message is not None
    return message


def test_closing_does_not_wait_for_a_dispatcher_that_is_stuck() -> None:
    stuck, release, closed = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        stuck.set()
        assert release.wait(30)

    def rank(group: ProcessGroup) -> bool:
        if group.rank == 1:
            assert closed.wait(30)
            return True
        _pending_operation(group).notify(call)
        group._channel.abort("to end the operation")
        assert stuck.wait(30)
        group.close(0.5)
        closed.set()
        early = not release.is_set()
        release.set()
        return early

    assert run_threads(rank, 2, timeout=60) == [True, True]


def test_a_finalizer_in_the_dispatcher_may_close_the_world() -> None:
    ends: list[str] = []
    ended = threading.Event()

    def rank(group: ProcessGroup) -> None:
        if group.rank == 0:

            def finalize() -> None:
                try:
                    group.close(10)
                    ends.append(group.state)
                finally:
                    ended.set()

            _pending_operation(group).notify(finalize)
            group._channel.abort("to end the operation")
        assert ended.wait(30)

    run_threads(rank, 2, timeout=60)
    assert ends == ["closed"]
