"""Replays of recorded steps: what fails in them, and what they leave behind."""

from __future__ import annotations

import gc
import threading
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import shoal
from shoal.controller import Master
from shoal.controller.node.compilation import Program
from shoal.controller.recording import recorded_function
from shoal.controller.tensor.tensor import TensorHandle
from tests.controller.trainings import TRAININGS, until_replayed

NODE = "node:0"


# -- what fails --------------------------------------------------------------------------------


def test_what_fails_in_a_replay_poisons_what_depends_on_it_and_names_its_line(master: Master) -> None:
    table = torch.arange(4.0, device=NODE)
    count = torch.zeros((), device=NODE)

    @master.recorded
    def look_up(index: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = table[index]  # fails here
        y = x + 1
        count.add_(1)
        return found * 2, y * 3, torch.stack([y, y]).sum()

    right = torch.tensor([3], device=NODE)
    for _ in range(4):
        assert look_up(right, table)[0].item() == 6
    assert look_up.replays == 2
    bad, good, more = look_up(torch.tensor([9], device=NODE), table)
    assert look_up.replays == 3
    assert good.tolist() == [3, 6, 9, 12]
    assert more.item() == 20
    with pytest.raises(shoal.RemoteOpError) as caught:
        bad.tolist()
    assert "found = table[index]  # fails here" in caught.value.line
    assert "aten.index" in str(caught.value)
    poisoned, fine, _ = look_up(right, bad)  # of poison comes poison
    with pytest.raises(shoal.RemoteOpError):
        fine.tolist()
    assert poisoned.item() == 6
    assert look_up(right, table)[1].tolist() == [3, 6, 9, 12]
    assert count.item() == 7


def test_what_fails_in_place_poisons_what_it_would_have_written(master: Master) -> None:
    total = torch.zeros(3, device=NODE)
    view = total[:2]

    @master.recorded
    def add(index: Tensor, x: Tensor) -> Tensor:
        total.index_add_(0, index, x)
        return x * 2

    index, x = torch.tensor([0, 1], device=NODE), torch.ones(2, device=NODE)
    for _ in range(4):
        add(index, x)
    assert add(torch.tensor([0, 7], device=NODE), x).tolist() == [2, 2]
    assert add.replays == 3
    for each in (total, view):
        with pytest.raises(shoal.RemoteOpError, match="index_add_"):
            each.tolist()


# -- what is left behind -----------------------------------------------------------------------


def test_replays_leave_no_tensors_behind(master: Master) -> None:
    step, changed = TRAININGS["MLP, AdamW"](NODE)
    call = master.recorded(step)
    x, y = torch.randn(12, 1, 8, 8).to(NODE), torch.zeros(12, dtype=torch.int64, device=NODE)
    until_replayed(call, x, y)
    gc.collect()
    master.synchronize()
    before = master.stats()[0]["tensors"]
    for _ in range(20):
        call(x, y)
    gc.collect()
    master.synchronize()
    assert master.stats()[0]["tensors"] <= before
    del call, step, changed
    gc.collect()
    master.synchronize()
    assert master.stats()[0]["tensors"] < before


def _programs() -> int:
    """How many programs this node knows."""
    return sum(type(each) is Program for each in gc.get_objects())


def test_nodes_forget_programs_that_nothing_has_any_more(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_function, "MAX_ARGUMENT_KINDS", 6)
    x = torch.ones(3, device=NODE)

    def once(factor: float) -> None:
        step = master.recorded(lambda x: x * factor)
        assert until_replayed(step, x).tolist() == [factor] * 3

    once(1.0)
    gc.collect()
    before = master.call(NODE, _programs)
    for i in range(12):
        once(float(i))
        gc.collect()
    assert master.call(NODE, _programs) <= before + 1
    changing = master.recorded(lambda x, factor: x + factor)
    for i in range(16):  # kinds of arguments
        for _ in range(3):
            changing(x, i)
    assert master.call(NODE, _programs) <= before + 1 + 7


@pytest.mark.stress
def test_a_hundred_thousand_replays_leave_nothing_behind(master: Master) -> None:
    place = master.nodes
    total = torch.zeros(3, device=place.device)

    @master.recorded
    def step(x: Tensor) -> Tensor:
        y = x * 2
        total.add_(y.to(place.device))
        return y + total.on(0)

    x = torch.ones(3, device=NODE)
    until_replayed(step, x)

    def now() -> tuple[list[tuple[int, int]], int]:
        gc.collect()
        master.synchronize()
        grown = [each["tensors"] for each in master.stats()]
        known = [each["calls"] for each in master.stats()]
        return list(zip(grown, known, strict=True)), psutil.Process().memory_info().rss

    def run(count: int) -> None:
        for _ in range(count):
            step(x)

    run(5_000)
    counts, memory = now()
    run(100_000)
    after, grown = now()
    assert after == counts
    assert grown - memory < 32 << 20
    assert step.recordings <= 3


def test_programs_are_recorded_anew_when_calls_are_forgotten(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = master.recorded(lambda x: x * 2 + 1)
    x = torch.ones(3, device=NODE)
    assert until_replayed(twice, x).tolist() == [3, 3, 3]
    monkeypatch.setattr("shoal.controller.tensor.calls.MAX_INTERNED_CALLS", 1)
    assert (x - 5).tolist() == [-4, -4, -4]
    monkeypatch.undo()
    before = twice.recordings
    assert until_replayed(twice, x).tolist() == [3, 3, 3]
    assert twice.recordings == before + 2


def test_threads_may_call_a_recorded_step_side_by_side(master: Master) -> None:
    square = master.recorded(lambda x: (x * x + 1).sum())
    wrong: list[Any] = []

    def work(value: float) -> None:
        i = 0
        while i < 60 or square.replays <= 100:  # while one records, the others call the function itself
            x = torch.full((3,), value + i % 60, device=NODE)
            found = square(x)
            if i % 20 == 19 and found.item() != 3 * (value + i % 60) ** 2 + 3:
                wrong.append((value, i))
            i += 1
            if i > 10_000:
                break

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert square.replays > 100


def test_a_tensor_that_another_thread_frees_meanwhile_is_not_written_over(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, recorded = threading.Event(), threading.Event()
    free = TensorHandle.__del__

    def held_up(self: TensorHandle) -> None:
        free(self)
        if threading.current_thread() is thread:
            freed.set()
            recorded.wait()

    monkeypatch.setattr(TensorHandle, "__del__", held_up)
    step = master.recorded(lambda x: x * 2 + 1)
    x = torch.ones(4, device=NODE)
    held = [torch.zeros(4, device=NODE)]
    thread = threading.Thread(target=held.clear)
    results = [step(x)]
    thread.start()
    freed.wait()  # its id is free, and the handle is still found
    results.append(step(x))
    recorded.set()
    thread.join()
    mine = [torch.full((4,), 100.0 + i, device=NODE) for i in range(8)]
    results.append(step(x))
    assert step.replays == 1
    assert [each[0].item() for each in mine] == [100.0 + i for i in range(8)]
