"""Tensors of an operation stay while the core works on them, and not a moment longer."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from shoal.backend.native import channel as native
from shoal.errors import OutOfResources
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.waiting import until

PATIENCE = 30.0


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nothing_is_remembered_of_operations_beside_a_receive_that_waits(transport: str) -> None:
    def fn(group: ProcessGroup) -> None:
        listening = group.recv(tag=5)
        kept = []
        for _ in range(200):
            x = torch.ones(10)
            kept.append(weakref.ref(x))
            group.all_reduce(x).wait()
            del x
        assert not any(ref() is not None for ref in kept)
        sent = group.send(torch.ones(1), 1 - group.rank, tag=5)
        assert listening.wait().item() == 1.0
        sent.wait()

    run_threads(fn, 2, transport=transport)


def test_a_tensor_is_free_when_its_operation_is_complete_though_nobody_waits(transport: str) -> None:
    others_turn = threading.Event()

    def fn(group: ProcessGroup) -> None:
        x = torch.ones(10)
        freed = weakref.ref(x)
        if group.rank == 1:
            others_turn.wait(PATIENCE)
        future = group.all_reduce(x)  # rank 0 has to wait for rank 1
        del future, x
        gc.collect()
        if group.rank == 0:
            assert freed() is not None, "the core still reads and writes it"
            others_turn.set()
        until(lambda: freed() is None)

    run_threads(fn, 2, transport=transport)


def test_or_only_looks_whether_it_is(transport: str) -> None:
    others_turn = threading.Event()

    def fn(group: ProcessGroup) -> None:
        x = torch.ones(10)
        freed = weakref.ref(x)
        if group.rank == 1:
            others_turn.wait(PATIENCE)
        future = group.all_reduce(x)
        if group.rank == 0:
            others_turn.set()
        until(future.done)
        del future, x
        assert freed() is None

    run_threads(fn, 2, transport=transport)


def test_what_is_dropped_before_it_is_complete_is_still_written(transport: str) -> None:
    others_turn = threading.Event()

    def fn(group: ProcessGroup) -> float:
        x = torch.ones(10)
        y = x.view(10)  # another tensor of the same memory
        if group.rank == 1:
            others_turn.wait(PATIENCE)
        group.all_reduce(x)
        del x
        gc.collect()
        others_turn.set()
        until(lambda: bool(y.eq(2).all()))
        return y[0].item()

    assert run_threads(fn, 2, transport=transport) == [2.0, 2.0]


class NoMoreThreads(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_it_is_said_and_made_up_for_later(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_turn, called = threading.Event(), threading.Event()

    def fn(group: ProcessGroup) -> None:
        if group.rank == 1:
            others_turn.wait(PATIENCE)
            for _ in range(3):
                group.all_reduce(torch.ones(10)).wait()
            return
        with monkeypatch.context() as patched:
            patched.setattr(native.threading, "Thread", NoMoreThreads)
            x = torch.ones(10)
            y, freed = x.detach(), weakref.ref(x)
            group.all_reduce(x)
            del x
            gc.collect()
            assert freed() is not None, "the core still reads and writes it"
            future = group.all_reduce(torch.ones(10))
            with pytest.raises(OutOfResources, match=r"rank 0 cannot tell .* \(ulimit -u\)"):
                future.add_done_callback(lambda _: called.set())
        last = group.all_reduce(torch.ones(10))
        last.add_done_callback(lambda _: None)
        others_turn.set()
        last.wait()
        until(lambda: freed() is None)
        assert bool(y.eq(2).all())
        assert called.wait(PATIENCE)

    run_threads(fn, 2, transport=transport)
