"""``with stream:`` in an order of its own, and the first stream of a master."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.api.streams import current_stream, default_stream
from tests.controller import delays
from tests.controller.delays import held

NODE = "node:0"


def test_streams_may_be_left_in_another_order_than_they_were_entered_in(master: Master) -> None:
    first, second = shoal.Stream(NODE), shoal.Stream(NODE)
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert current_stream(NODE) == second
    second.__exit__()
    assert current_stream(NODE) == default_stream(NODE)


@pytest.mark.usefixtures("no_master")
def test_the_first_stream_waits_for_what_was_issued_before_it_was_made() -> None:
    with shoal.init_master_worker(workers=1) as master:
        (line,) = master._nodes
        line.call(delays.know_naps).wait()
        x = torch.ones(3, device=NODE)
        y = held(x)
        x.add_(1)  # after y, so it is 1 until that is let go
        side = shoal.Stream(NODE)
        with side:
            z, w = x * 2, y * 2
        event = side.record_event()
        assert not event.query()
        line.call(delays.let_go).wait()
        assert z.tolist() == [4] * 3
        assert w.tolist() == [2] * 3
