"""Events of nodes' streams: they tell, time and hold, across nodes too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.api.streams import default_stream
from tests.controller import delays
from tests.controller.delays import held, nap

NODE = "node:0"


@pytest.fixture(autouse=True)
def _nodes_know_naps(master: Master) -> None:
    for each in master._nodes:
        each.call(delays.know_naps).wait()


def _streams(count: int) -> list[shoal.Stream]:
    return [default_stream(NODE), *(shoal.Stream(NODE) for _ in range(count))]


def test_a_stream_waits_for_an_event_of_another_node(master: Master) -> None:
    first, second = shoal.Stream("node:0"), shoal.Stream("node:1")
    x, y = torch.ones(1, device="node:0"), torch.ones(1, device="node:1")
    master.synchronize()
    with first:
        nap(x, 0.3)
    event = first.record_event()
    event.wait(second)
    with second:
        after = second.record_event()
        z = y + 1
    assert (y + 1).item() == 2  # the default stream waits for nothing
    assert z.item() == 2
    assert event.query()
    assert after.query()


def test_a_stream_waits_for_an_event_and_for_a_stream_of_its_node(master: Master) -> None:
    first, second = shoal.Stream(NODE), shoal.Stream(NODE)
    x = torch.ones(1, device=NODE)
    for wait in (second.wait_stream, lambda stream: second.wait_event(stream.record_event())):
        before, after = shoal.Event(enable_timing=True), shoal.Event(enable_timing=True)
        with first:
            nap(x, 0.05)
        before.record(first)
        wait(first)
        after.record(second)
        assert before.elapsed_time(after) >= 0


def test_events_have_times(master: Master) -> None:
    streams = _streams(2)
    x = torch.ones(1, device=NODE)
    events = []
    for stream in streams:
        for _ in range(3):
            events.append(shoal.Event(enable_timing=True).record(stream))
            with stream:
                x = nap(x, 0.02)
    times = [events[0].elapsed_time(event) for event in events]
    assert times[0] == 0
    for each in (times[:3], times[3:6], times[6:]):  # of one stream
        assert each[1] - each[0] >= 20
        assert each[2] - each[1] >= 20
    assert events[-1].elapsed_time(events[0]) == -times[-1]
    with pytest.raises(shoal.UsageError, match="enable_timing"):
        events[0].elapsed_time(shoal.Event().record())
    other = shoal.Event(enable_timing=True).record(shoal.Stream("node:1"))
    with pytest.raises(shoal.UsageError, match="clocks"):
        events[0].elapsed_time(other)


def test_the_device_module_has_streams_as_that_of_cuda_has(master: Master) -> None:
    module: Any = torch.get_device_module("node")
    stream = module.Stream(NODE)
    assert module.current_stream(NODE) == module.default_stream(NODE)
    with module.stream(stream):
        assert module.current_stream(NODE) == module.current_stream() == stream
        assert module.current_stream("node:1") == module.default_stream("node:1")
        assert module.Event().record().query() in (False, True)
    assert module.current_stream(NODE).stream_id == 0
    assert stream.device == torch.device(NODE)
    with pytest.raises(shoal.UsageError, match="cpu is not a node: a stream needs a node"):
        shoal.Stream("cpu")


def test_an_event_of_a_place_has_passed_when_all_its_nodes_have(master: Master) -> None:
    team, alone = shoal.Stream(master.place([0, 1])), shoal.Stream(NODE)
    x = torch.ones(1, device="node:1")
    with shoal.Stream("node:1") as other:
        waited = held(x)
    team.wait_stream(other)
    event = team.record_event()
    event.wait(alone)
    with alone:
        after = alone.record_event()
    assert torch.ones(1, device=NODE).item() == 1
    assert not event.query()
    assert not after.query()
    master._nodes[1].call(delays.let_go).wait()
    after.synchronize()
    assert event.query()
    assert waited.item() == 1
