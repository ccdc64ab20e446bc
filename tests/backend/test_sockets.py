"""Waiting threads read the sockets themselves: nobody who sleeps is forgotten, whoever reads for him."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.waiting import until

#: elements: one segment, one message in two pieces, a large message in many
SIZES = (1, 20_000, 300_000)


def _sum(group: ProcessGroup, elements: int) -> None:
    x = torch.full((elements,), float(group.rank + 1))
    group.all_reduce(x).wait()
    expected = group.size * (group.size + 1) / 2
    assert x[0] == expected
    assert x[-1] == expected


@pytest.mark.concurrency
@pytest.mark.parametrize("size", [2, 3])
def test_threads_that_wait_for_different_groups_read_for_one_another(size: int) -> None:
    """One thread a group: whoever polls the sockets reads for those that gave up and sleep."""

    def work(group: ProcessGroup) -> None:
        groups = [own for _ in range(3) if (own := group.split(color=0)) is not None]
        failures: list[BaseException] = []

        def reduce_at_random(own: ProcessGroup, index: int) -> None:
            pauses = random.Random(group.rank * 10 + index)
            plan = random.Random(index)  # the same on all ranks
            try:
                for _ in range(60):
                    if pauses.random() < 0.1:
                        # Long enough for others to give up polling, and for the watch thread to take over.
                        time.sleep(pauses.random() * 0.004)
                    _sum(own, plan.choice(SIZES))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=reduce_at_random, args=(g, i)) for i, g in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for own in groups:
            own.close()
        if failures:
            raise failures[0]

    run_threads(work, size, transport="tcp", op_timeout=20.0)


@pytest.mark.concurrency
def test_operations_nobody_waits_for_go_on_while_another_is_waited_for_and_after() -> None:
    """The watch thread leaves the sockets to whoever waits, and takes them back when he is gone."""

    def work(group: ProcessGroup) -> None:
        other = group.split(color=0)
        assert other is not None
        for _ in range(20):
            x = torch.ones(300_000)
            unattended = other.all_reduce(x)
            _sum(group, 1)
            until(unattended.done)
            assert x[-1] == group.size
        other.close()

    run_threads(work, 2, transport="tcp", op_timeout=20.0)


def test_many_small_messages_of_one_segment_are_all_delivered() -> None:
    """Several frames arrive in one read: none may wait for an event that never comes."""

    def work(group: ProcessGroup) -> None:
        peer = 1 - group.rank
        for _ in range(5):
            sent = [group.send(torch.tensor([float(i)]), peer, tag=i) for i in range(200)]
            got = [group.recv(src=peer, tag=i).wait() for i in reversed(range(200))]
            for future in sent:
                future.wait()
            assert [int(received.item()) for received in got] == list(reversed(range(200)))

    run_threads(work, 2, transport="tcp", op_timeout=20.0)
