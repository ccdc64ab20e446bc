"""An outcome of the core is published once, whether C does it in ``wait()`` or Python does elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal import _core
from shoal.backend.native.channel import _CoreFuture
from shoal.future import Future
from shoal.group import ProcessGroup
from shoal.spec import SUM, OpKind
from shoal.testing import run_threads

pytestmark = pytest.mark.concurrency


class Last:
    """What the operation keeps; when it goes, C is in ``wait()``, between completion and outcome."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self._meddle = meddle

    def __del__(self) -> None:
        self._meddle()


@pytest.mark.parametrize("how", ["done", "wait", "then"])
def test_an_outcome_that_python_publishes_while_c_is_about_to_is_published_once(how: str) -> None:
    def between(group: ProcessGroup) -> None:
        channel: Any = group._channel
        core = channel._core.collective(OpKind.BARRIER, [], [], 0, 0, SUM.code, -1, [], 0, 0, 30.0)
        told: list[int] = []
        children: list[Future[None]] = []

        def meddle() -> None:
            if how == "then":
                children.append(future.then(lambda f: told.append(f.value())))
            else:
                getattr(future, how)()

        future: Future[int] = _CoreFuture(_core.Source(channel, core, Last(meddle)), value=7)
        record = _core.Record(future, OpKind.BARRIER, -1, 0, None, 0)
        future.set_record(record)
        assert future.wait() == 7
        ended = record.ended
        assert ended > 0
        assert future.then(lambda f: f.value()).wait(30) == 7
        assert record.ended == ended
        for child in children:
            child.wait(30)
        assert told == [7] * (how == "then")

    run_threads(between, 1, timeout=60)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns after a handful of bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_waits_questions_and_callbacks_at_once_agree_on_one_outcome(restless: None) -> None:
    def poll(future: Future[Any]) -> Any:
        while not future.done():
            pass
        return future.value()

    def ask(group: ProcessGroup, threads: ThreadPoolExecutor) -> None:
        told: list[Any] = []
        begin = threading.Barrier(3)
        x = torch.ones(2)
        future = group.all_reduce(x)
        record = future.record

        def tell(future: Future[Any]) -> Any:
            future.then(told.append).wait(30)
            return future.value()

        def together(way: Callable[[Future[Any]], Any]) -> Any:
            begin.wait(30)
            return way(future)

        answers = list(threads.map(together, (lambda future: future.wait(), poll, tell)))
        assert all(answer is x for answer in (future.wait(), *answers))
        assert record is not None
        ended = record.ended
        assert told == [future]
        assert ended > 0
        assert record.ended == ended

    def at_once(group: ProcessGroup) -> None:
        with ThreadPoolExecutor(3) as threads:
            for _ in range(150):
                ask(group, threads)

    run_threads(at_once, 2, timeout=60)
