"""The flight recorder."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from shoal import ProcessGroup
from shoal.errors import PeerLost
from shoal.future import Future
from shoal.recorder import FlightRecorder
from shoal.spec import OpKind
from shoal.testing import run_threads
from tests.future.sources import ManualSource
from tests.support.waiting import until


def _add(recorder: FlightRecorder, number: int, future: Future[None] | None = None) -> Future[None]:
    future = Future() if future is None else future
    recorder.add(future, OpKind.ALL_REDUCE, number, 0, torch.float32, 8)
    return future


def test_an_operation_is_recorded_with_its_arguments_and_times() -> None:
    recorder = FlightRecorder("world", 1)
    future: Future[None] = Future()
    recorder.add(future, OpKind.BROADCAST, 3, 0, torch.bfloat16, 12, root=2)
    message: Future[None] = Future()
    recorder.add(message, OpKind.SEND, -1, 77, None, 0, peer=1, tag=5)
    first, second = recorder.entries()
    assert (first.kind, first.number, first.dtype, first.count, first.root) == (
        "broadcast",
        3,
        "bfloat16",
        12,
        2,
    )
    assert (second.kind, second.key, second.dtype, second.peer, second.tag) == ("send", 77, "", 1, 5)
    assert (first.state, first.ended) == ("submitted", 0)
    assert 0 < first.submitted <= second.submitted
    future.set_result(None)
    first, _ = recorder.entries()
    assert first.state == "completed"
    assert first.ended >= first.submitted


def test_the_oldest_operations_make_room() -> None:
    recorder = FlightRecorder("world", 0, size=3)
    futures = [_add(recorder, number) for number in range(5)]
    assert [entry.number for entry in recorder.entries()] == [2, 3, 4]
    assert len(futures) == 5


def test_a_recorder_of_size_0_keeps_nothing() -> None:
    recorder = FlightRecorder("world", 0, size=0)
    _add(recorder, 0)
    assert recorder.entries() == []
    assert recorder.last_completed is None


def test_the_count_of_an_operation_is_that_of_all_its_inputs() -> None:
    def rank(group: ProcessGroup) -> list[int]:
        group.reduce_scatter(torch.empty(2 + group.rank), [torch.ones(2), torch.ones(3)]).wait()
        group.reduce_scatter_single(torch.empty(2), torch.ones(4)).wait()
        parts = [torch.ones(1), torch.ones(2)] if group.rank == 0 else None
        group.scatter(torch.empty(1 + group.rank), parts, 0, sizes=[1, 2]).wait()
        assert group.recorder
        return [entry.count for entry in group.recorder.entries()]

    assert run_threads(rank, 2) == [[5, 4, 3], [5, 4, 2]]


def test_no_operation_ends_before_it_was_submitted() -> None:
    def rank(group: ProcessGroup) -> None:
        for _ in range(5):
            group.barrier().wait()
            group.all_gather([torch.empty(3) for _ in range(2)], torch.ones(3)).wait()
            group.all_reduce(torch.ones(3)).then(lambda _: group.all_reduce(torch.ones(3))).wait().wait()
            if group.rank == 0:
                group.send(torch.ones(3), 1).wait()
            else:
                group.recv(torch.empty(3), 0).wait()
        assert group.recorder is not None
        entries = group.recorder.entries()
        assert len(entries) == 25
        assert all(entry.submitted <= entry.ended for entry in entries)

    run_threads(rank, 2)


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(3, 2).t()], ids=["fast path", "staged"])
def test_the_time_of_the_end_is_not_that_of_the_wait(x: torch.Tensor) -> None:
    def rank(group: ProcessGroup) -> None:
        future = group.all_reduce(x.clone(memory_format=torch.preserve_format))
        until(lambda: group.stats().completed == 1)  # a thread of the core completes it
        before = time.monotonic_ns()
        future.wait()
        assert group.recorder is not None
        assert group.recorder.entries()[0].ended <= before

    run_threads(rank, 2)


def test_reading_asks_for_completions_that_nobody_has_seen() -> None:
    recorder = FlightRecorder("world", 0)
    source = ManualSource()
    future = _add(recorder, 0, Future(source))
    assert recorder.entries()[0].state == "submitted"
    source.complete()
    (entry,) = recorder.entries()
    assert entry.state == "completed"
    assert recorder.entries() == [entry]
    assert future.done()


def test_a_failure_is_kept_in_words() -> None:
    recorder = FlightRecorder("world", 0)
    future = _add(recorder, 0)
    error = PeerLost("rank 3 died", ranks=[3])
    future.set_exception(error)
    (entry,) = recorder.entries()
    assert (entry.state, entry.failure) == ("failed", "PeerLost: rank 3 died")


def test_an_outcome_outlives_its_future_and_a_dropped_one_is_told_apart() -> None:
    recorder = FlightRecorder("world", 0)
    _add(recorder, 0).set_result(None)
    _add(recorder, 1)
    assert [entry.state for entry in recorder.entries()] == ["completed", "released"]


def test_a_future_that_was_complete_before_is_recorded_so() -> None:
    recorder = FlightRecorder("world", 0)
    done: Future[None] = Future()
    done.set_result(None)
    failed: Future[None] = Future()
    failed.set_exception(ValueError("no"))
    _add(recorder, 0, done)
    _add(recorder, 1, failed)
    del done, failed
    assert [entry.state for entry in recorder.entries()] == ["completed", "failed"]


def test_the_last_completed_operation_has_the_highest_number() -> None:
    recorder = FlightRecorder("world", 0)
    futures = [_add(recorder, number) for number in range(4)]
    message: Future[None] = Future()
    recorder.add(message, OpKind.RECV, -1, 0, None, 0)
    assert recorder.last_completed is None
    for number in (0, 2, 1):
        futures[number].set_result(None)
    message.set_result(None)
    futures[3].set_exception(ValueError())
    assert recorder.last_completed is not None
    assert recorder.last_completed.number == 2


@pytest.mark.parametrize("end", [lambda f: f.set_result(None), lambda f: f.set_exception(ValueError())])
def test_the_record_keeps_no_tensor_alive(end: Callable[[Future[None]], None]) -> None:
    gc.collect()
    gc.disable()
    try:
        recorder = FlightRecorder("world", 0)
        tensors = [torch.ones(1), torch.ones(1)]
        references = [weakref.ref(tensor) for tensor in tensors]
        pending = _add(recorder, 0, Future(keep=tensors[0]))
        ended = _add(recorder, 1, Future(keep=tensors[1]))
        end(ended)
        recorder.entries()
        del pending, ended, tensors
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_the_dump_is_a_table_with_the_group_the_rank_and_every_state() -> None:
    recorder = FlightRecorder("world/evens", 2)
    done, failed = _add(recorder, 41), _add(recorder, 42)
    done.set_result(None)
    failed.set_exception(PeerLost("rank 1 of [4, 7] died"))
    pending: Future[None] = Future()
    recorder.add(pending, OpKind.REDUCE, -1, 0xABC, torch.int64, 5, root=0)
    title, _, heading, _, *rows = recorder.dump().splitlines()
    assert title == "group 'world/evens', rank 2: the last 3 operations, 1 pending"
    assert heading.split() == [
        "operation",
        "count",
        "root",
        "peer",
        "tag",
        "age",
        "ms",
        "took",
        "ms",
        "state",
    ]
    assert "all_reduce #41" in rows[0]
    assert rows[0].endswith("completed")
    assert "8 float32" in rows[1]
    assert rows[1].endswith("failed: PeerLost: rank 1 of [4, 7] died")
    assert "reduce key 0xabc" in rows[2]
    assert rows[2].endswith("submitted")


def test_the_json_form_has_everything() -> None:
    recorder = FlightRecorder("world", 1)
    future = _add(recorder, 7)
    content = json.loads(recorder.to_json())
    assert (content["group"], content["rank"]) == ("world", 1)
    (entry,) = content["entries"]
    assert (entry["kind"], entry["number"], entry["state"]) == ("all_reduce", 7, "submitted")
    assert entry["submitted"] <= content["now"]
    future.set_result(None)


@pytest.mark.concurrency
def test_reading_while_others_record_is_safe() -> None:
    recorder = FlightRecorder("world", 0, size=50)
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            _add(recorder, number).set_exception(ValueError())
            number += 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        entries = recorder.entries()
        assert len(entries) <= 50
        assert all(entry.failure for entry in entries if entry.state == "failed")
    until(lambda: len(recorder.entries()) == 50)  # the threads may have begun only now
    stop.set()
    for thread in threads:
        thread.join()
    assert len(recorder.entries()) == 50


def test_the_representation_says_who_where_and_what_is_pending() -> None:
    recorder = FlightRecorder("world", 1)
    assert repr(recorder) == (
        "<FlightRecorder of group 'world', rank 1: the last 0 operations, 0 pending; "
        "print(recorder.dump()) shows them>"
    )
    futures = [_add(recorder, number) for number in range(2)]
    futures[0].set_result(None)
    assert "the last 2 operations, 1 pending; the last is all_reduce #1, submitted; print" in repr(recorder)


def test_a_barrier_is_recorded_without_a_tensor() -> None:
    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        assert group.recorder is not None
        (entry,) = group.recorder.entries()
        assert (entry.name, entry.dtype, entry.count) == ("barrier #0", "", 0)

    run_threads(rank, 1)
