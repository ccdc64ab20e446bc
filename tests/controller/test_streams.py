"""Streams of nodes: no order of their threads is seen by a program, and none holds another up."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.api.streams import default_stream
from shoal.controller.commands import connection
from shoal.controller.tensor import stream_order
from tests.controller import delays
from tests.controller.delays import held, nap

NODE = "node:0"


@pytest.fixture(autouse=True)
def _nodes_know_naps(master: Master) -> None:
    for each in master._nodes:
        each.call(delays.know_naps).wait()


@pytest.fixture
def dawdling(master: Master) -> Iterator[None]:
    """Nodes that sleep between commands, at random."""
    for each in master._nodes:
        each.call(delays.dawdle, each.index, 0.05, 0.002).wait()
    yield
    for each in master._nodes:
        each.call(delays.hurry).wait()


class _Program:
    """The same operations on tensors of a node, each on a stream by chance, and on tensors here."""

    def __init__(self, seed: int, streams: list[shoal.Stream]) -> None:
        self.dice = random.Random(seed)
        self.streams = streams
        self.here = [torch.arange(16.0).view(4, 4) + i for i in range(4)]
        self.there = [each.to(NODE) for each in self.here]

    def step(self) -> None:
        """One operation."""
        dice = self.dice
        i, j = dice.randrange(len(self.here)), dice.randrange(len(self.here))
        operation = dice.choice([self._new, self._write, self._view, self._write, self._free, self._fetch])
        with dice.choice(self.streams):
            operation(i, j)

    def _each(self, operation: Any) -> None:
        operation(self.here)
        operation(self.there)

    def _new(self, i: int, j: int) -> None:
        if self.dice.random() < 0.1:
            self.here.append(self.here[i] * 0.5)
            self.there.append(nap(self.there[i] * 0.5, self.dice.random() * 0.003))
        else:
            self._each(lambda given: given.append((given[i].sum() + given[j].mean(dim=-1)) * 0.25))
        self._each(lambda given: given.append(given[-1].sum().remainder(7).expand(4, 4).clone()))

    def _write(self, i: int, j: int) -> None:
        kind = self.dice.randrange(4)

        def write(given: list[torch.Tensor]) -> None:
            if kind == 0:
                given[i].mul_(0.5)
            elif kind == 1:
                given[i].add_(given[j].max()).remainder_(11)
            elif kind == 2:
                given[i].fill_(given[j].flatten()[0])
            else:
                torch._foreach_add_([given[i], given[0]], [given[j].sum() * 1e-3, given[1].mean()])

        if kind != 2 or self.here[i].dim():
            if any(each.dim() and 0 in each.stride() for each in (self.here[i], self.here[0])):
                return
            write(self.here)
            write(self.there)

    def _view(self, i: int, j: int) -> None:
        kind = self.dice.randrange(4)

        def view(given: list[torch.Tensor]) -> None:
            x = given[i]
            if kind == 0 and x.dim():
                given.append(x[: max(1, len(x) // 2)])
            elif kind == 1 and x.dim() == 2:
                given.append(x.t())
            elif kind == 2 and x.dim() == 2:
                given.extend(x.split(2))
            else:
                given.append(x.view(x.shape).detach())

        self._each(view)

    def _free(self, i: int, j: int) -> None:
        if len(self.here) > 24:
            for k in sorted({i, j, *self.dice.sample(range(2, len(self.here)), 6)} - {0, 1}, reverse=True):
                del self.here[k], self.there[k]

    def _fetch(self, i: int, j: int) -> None:
        if self.dice.random() < 0.05:
            assert torch.equal(self.there[i].cpu(), self.here[i])

    def check(self, master: Master) -> None:
        for here, there in zip(self.here, master.fetch(self.there).wait(), strict=True):
            assert torch.equal(here, there)


def _streams(count: int) -> list[shoal.Stream]:
    return [default_stream(NODE), *(shoal.Stream(NODE) for _ in range(count))]


@pytest.mark.usefixtures("dawdling")
@pytest.mark.parametrize("seed", range(3))
def test_programs_over_several_streams_give_what_they_give_here(master: Master, seed: int) -> None:
    program = _Program(seed, _streams(3))
    for _ in range(500):
        program.step()
    program.check(master)


@pytest.mark.stress
@pytest.mark.usefixtures("dawdling")
@pytest.mark.parametrize("seed", range(100, 110))
def test_long_programs_over_many_streams_give_what_they_give_here(master: Master, seed: int) -> None:
    program = _Program(seed, _streams(2 + seed % 5))
    before = master.stats()[0]["tensors"]
    for _ in range(10):
        for _ in range(500):
            program.step()
        program.check(master)
    program.here.clear()
    program.there.clear()
    gc.collect()
    master.synchronize()
    assert master.stats()[0]["tensors"] <= before + 2


def test_a_stream_that_is_held_holds_no_other(master: Master) -> None:
    waits, free = shoal.Stream(NODE), shoal.Stream(NODE)
    x, used = torch.ones(3, device=NODE), torch.ones(3, device=NODE)
    with waits:
        late = held(used)
    with free:
        assert (x + 1).tolist() == [2, 2, 2]
        assert (used + 1).tolist() == [2, 2, 2]  # both read it
    assert (x * 3).tolist() == [3, 3, 3]
    for _ in range(2000):
        x = x + 1
    assert x[0].item() == 2001
    del used
    assert not waits.query()
    master._nodes[0].call(delays.let_go).wait()
    assert late.tolist() == [1, 1, 1]
    waits.synchronize()
    assert waits.query()


def test_who_writes_waits_for_those_who_read_on_other_streams(master: Master) -> None:
    reads, writes = shoal.Stream(NODE), shoal.Stream(NODE)
    x = torch.ones(3, device=NODE)
    view = x[1:]
    with reads:
        slow = nap(x[0], 0.05) + x[0]
    with writes:
        view.zero_()
        x.mul_(7)
    assert slow.item() == 2
    assert x.tolist() == [7, 0, 0]


def test_what_is_freed_is_there_for_streams_that_still_use_it(master: Master) -> None:
    first, second = shoal.Stream(NODE), shoal.Stream(NODE)
    results = []
    for i in range(50):
        x = torch.full((8,), float(i), device=NODE)
        with first:
            y = nap(x, 0.002) + x
        with second:
            z = x * 2
            del x
            for _ in range(3):
                torch.full((8,), -1.0, device=NODE)  # takes an id that is free
        results.append((y, z))
    for i, (y, z) in enumerate(results):
        assert y[0].item() == z[0].item() == 2 * i


def test_random_numbers_keep_the_order_of_the_program(master: Master) -> None:
    def draw(streams: list[shoal.Stream]) -> list[Any]:
        torch.manual_seed(3)
        drawn = []
        for i in range(40):
            with streams[i % len(streams)]:
                drawn.append(torch.rand(3, device=NODE))
                if i % 7 == 0:
                    nap(drawn[-1], 0.002)
        return [each.tolist() for each in master.fetch(drawn).wait()]

    torch.manual_seed(3)
    expected = [torch.rand(3).tolist() for _ in range(40)]
    assert draw(_streams(0)) == expected
    assert draw(_streams(3)) == expected


def test_a_failure_passes_from_stream_to_stream_with_its_line(master: Master) -> None:
    fails, reads = shoal.Stream(NODE), shoal.Stream(NODE)
    table = torch.ones(3, device=NODE)
    base = torch.ones(4, device=NODE)
    with fails:
        lost = nap(table, 0.05)[torch.tensor([9], device=NODE)]  # the line that fails
        nap(table, 0.5)  # its batch is not acknowledged when somebody hears of the failure
    with reads, pytest.raises(shoal.RemoteOpError, match="the line that fails"):
        (lost * 2).sum().item()
    with reads:
        view = base[2:]
        view.add_(lost)
    with pytest.raises(shoal.RemoteOpError, match="the line that fails"):
        base.tolist()
    assert table.tolist() == [1, 1, 1]
    master.synchronize()  # it was seen


def test_synchronize_raises_what_failed_on_any_stream(master: Master) -> None:
    stream = shoal.Stream(NODE)
    with stream:
        _ = torch.ones(3, device=NODE)[torch.tensor([9], device=NODE)]
    with pytest.raises(shoal.RemoteOpError, match="out of bounds"):
        master.synchronize()
    with stream:
        _ = torch.ones(3, device=NODE)[torch.tensor([9], device=NODE)]
    with pytest.raises(shoal.RemoteOpError, match="out of bounds"):
        stream.synchronize()


def test_synchronize_waits_for_all_streams(master: Master) -> None:
    streams = _streams(3)
    x = torch.ones(1, device=NODE)
    for stream in streams:
        with stream:
            nap(x, 0.05)
    events = [stream.record_event() for stream in streams]
    master.synchronize()
    assert all(event.query() for event in events)
    assert master.stats()[0]["pending"] == 0


def test_all_streams_count_for_a_program_that_is_too_far_ahead(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_COMMANDS", 500)
    streams = _streams(2)
    x = torch.zeros(3, device=NODE)
    most = 0
    for i in range(1500):
        with streams[i % 3]:
            x = x + 1
            if i % 200 == 0:
                x = nap(x, 0.01)
        most = max(most, master._nodes[0].pending)
    assert most <= 500 + 3 * 128
    assert x[0].item() == 1500


def test_threads_have_streams_of_their_own(master: Master) -> None:
    results: list[Any] = [None] * 3
    shared = torch.zeros(3, device=NODE)

    def work(index: int) -> None:
        assert shoal.controller.api.streams.current_stream(NODE).stream_id == 0
        with shoal.Stream(NODE):
            x = torch.zeros(2, device=NODE, requires_grad=True)
            y: torch.Tensor = x
            for _ in range(100):
                y = y + index
                with torch.no_grad():
                    shared.add_(1)
            y.sum().backward()
            assert x.grad is not None
            results[index] = (y.tolist(), x.grad.tolist())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [([100 * index] * 2, [1, 1]) for index in range(3)]
    assert shared.tolist() == [300] * 3


def test_streams_that_nobody_has_are_used_again_and_many_share_some(master: Master) -> None:
    gc.collect()  # or streams of earlier tests may come back meanwhile
    kept = shoal.Stream(NODE)
    numbers = {shoal.Stream(NODE).stream_id for _ in range(1000)}
    assert len(numbers) == 1
    assert kept.stream_id not in numbers
    before = threading.active_count()
    many = [shoal.Stream(NODE) for _ in range(1000)]
    assert len({each.stream_id for each in (kept, *many)}) == stream_order.MAX_STREAMS
    assert threading.active_count() <= before + stream_order.MAX_STREAMS
    x = torch.zeros(1, device=NODE)
    for each in many[:100]:
        with each:
            x.add_(1)
    assert x.item() == 100
    del many, each
    gc.collect()
    assert shoal.Stream(NODE).stream_id != kept.stream_id


def test_what_a_place_gathers_is_what_its_streams_wrote(master: Master) -> None:
    team = master.place([0, 1])
    x = team.replicate(torch.zeros(3))
    with shoal.Stream(team):
        y = nap(x, 0.05) + 1
        x.add_(nap(y, 0.05))
    assert [each.tolist() for each in team.gather(x)] == [[1.0] * 3] * 2


@pytest.mark.usefixtures("dawdling")
def test_replays_of_recorded_steps_keep_the_order_of_all_streams(master: Master) -> None:
    state, here = torch.zeros(3, device=NODE), torch.zeros(3)

    @master.recorded
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(x.sum())
        return x.view(3, 1), (x + state).remainder(31)

    dice, streams = random.Random(7), _streams(2)
    x, local = torch.arange(3.0, device=NODE), torch.arange(3.0)
    for i in range(30):
        with dice.choice(streams):
            x.add_(1).remainder_(13)
        with dice.choice(streams):
            view, result = step(x)
        with dice.choice(streams):
            view.mul_(2)  # the memory of the argument
            state.mul_(0.5)
        local = (local + 1).remainder(13)
        here = here + local.sum()
        expected = (local + here).remainder(31)
        local, here = local * 2, here * 0.5
        if i % 3 == 0:
            with dice.choice(streams):
                assert torch.equal(result.cpu(), expected)
                assert torch.equal(x.cpu(), local)
                assert torch.equal(state.cpu(), here)
        if i % 7 == 6:  # ids that streams have freed are in the next replays
            with dice.choice(streams):
                x = x.clone()
    assert step.replays > 20


def test_a_recorded_step_refuses_streams_and_events_inside(master: Master) -> None:
    stream, x = shoal.Stream(NODE), torch.ones(2, device=NODE)

    def chooses() -> torch.Tensor:
        with stream:
            return x + 1

    def records() -> torch.Tensor:
        stream.record_event()
        return x + 1

    def waits(event: shoal.Event) -> torch.Tensor:
        event.wait()
        return x + 1

    for fn, args in ((chooses, ()), (records, ()), (waits, (stream.record_event(),))):
        with pytest.raises(shoal.RecordingMismatch, match="outside the function"):
            master.recorded(fn)(*args)
    assert chooses().tolist() == [2, 2]


def test_what_a_replay_returns_shows_the_memory_that_it_showed_in_the_recording(master: Master) -> None:
    kept: list[Any] = [None]
    state = torch.zeros(4, device=NODE)

    @master.recorded
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept[0] = x[:2]
        y = x + 1
        return x.view(2, 2), state[1:], y, y.t()

    for _ in range(5):
        x = torch.zeros(4, device=NODE)
        results: list[Any] = list(step(x))
    assert step.replays
    view, part, fresh, other = [each.handle.memory() for each in results]
    here: Any = x
    assert view is here.handle.memory() is kept[0].handle.memory()
    there: Any = state
    assert part is there.handle.memory()
    assert fresh is other
    assert len({view, part, fresh}) == 3


@pytest.mark.usefixtures("dawdling")
def test_places_have_streams_whose_tensors_share_memory_with_those_of_nodes(master: Master) -> None:
    team = master.place([0, 1])
    stream, side = shoal.Stream(team), shoal.Stream("node:1")
    x = torch.zeros(4, device=team.device)
    part = x.on(1)
    for i in range(20):
        with stream:
            x.add_(1)
        with side:
            part.mul_(2)
            assert part[0].item() == 2 ** (i + 2) - 2
    scattered = team.scatter([torch.ones(2, device="node:0"), part[:2]])
    with stream:
        scattered.fill_(5)
    assert part.tolist()[:2] == [5, 5]
    assert x.on(0)[0].item() == 20


@pytest.mark.usefixtures("dawdling")
def test_copies_between_nodes_keep_the_order_of_all_streams(master: Master) -> None:
    dice = random.Random(5)
    near, far = ([default_stream(node), *(shoal.Stream(node) for _ in range(2))] for node in (NODE, "node:1"))
    x, here = torch.zeros(4, device=NODE), torch.zeros(4)
    copies: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for i in range(30):
        with dice.choice(near), dice.choice(far):
            x.add_(1)
            x.mul_(2).remainder_(101)
            here = ((here + 1) * 2).remainder(101)
        with dice.choice(near), dice.choice(far):
            copies.append(x.to("node:1"))
            expected.append(here)
        with dice.choice(near), dice.choice(far):
            copies[-1].mul_(3)
            expected[-1] = expected[-1] * 3
        if i % 5 == 4:
            with dice.choice(near), dice.choice(far):
                x.copy_(copies[dice.randrange(len(copies))].fill_(i))
                here = torch.full((4,), float(i))
                del copies[:], expected[:]
    assert torch.equal(x.cpu(), here)
    assert all(torch.equal(a, b) for a, b in zip(master.fetch(copies).wait(), expected, strict=True))


@pytest.mark.usefixtures("dawdling")
def test_collectives_of_places_that_overlap_keep_the_order_of_all_streams(master: Master) -> None:
    dice = random.Random(6)
    places = [master.place([0, 1]), master.place([1, 2]), master.nodes]
    tensors = [each.replicate(torch.zeros(3)) for each in places]
    here = [torch.zeros(len(each)) for each in places]
    streams = [default_stream("node:1"), shoal.Stream("node:1"), *(shoal.Stream(each) for each in places)]
    for _ in range(25):
        k, i = dice.randrange(3), dice.randrange(2)
        node, value = list(places[k].indices)[i], float(dice.randrange(10))
        with dice.choice(streams):
            tensors[k].on(node).add_(value)
            here[k][i] += value
        with dice.choice(streams):
            places[k].all_reduce_(tensors[k], op="max")
            here[k][:] = here[k].max()
        with dice.choice(streams):
            tensors[k].sub_(1)
            here[k] -= 1
    for place, there, local in zip(places, tensors, here, strict=True):
        assert [each[0].item() for each in place.gather(there)] == local.tolist()
        assert place.mean(there)[0].item() == local.mean()


def test_a_failure_on_a_stream_passes_to_streams_of_other_nodes(master: Master) -> None:
    fails, reads = shoal.Stream(NODE), shoal.Stream("node:1")
    table, other = torch.ones(3, device=NODE), torch.ones(1, device="node:1")
    with fails:
        lost = nap(table, 0.05)[torch.tensor([9], device=NODE)]  # the line that fails
        nap(table, 0.2)
    with reads:
        copy = lost.to("node:1")
        for _ in range(2):
            with pytest.raises(shoal.RemoteOpError, match="the line that fails"):
                (copy + other).sum().item()
    with pytest.raises(shoal.RemoteOpError, match="node 0"):
        copy.tolist()
    assert other.tolist() == [1]
    master.synchronize()  # it was seen
