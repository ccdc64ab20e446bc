"""Tensors that go from node to node."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.commands import connection
from tests.controller import copying
from tests.controller.test_deaths import Program, start  # noqa: F401  # a fixture

Start = Callable[[Callable[[Connection], None]], Program]


@pytest.fixture
def direct(master: Master, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whatever waits for a node, or fetches from it, fails until the patch is undone."""
    for name in ("wait_batch", "_wait_batch", "values_of"):
        monkeypatch.setattr(connection.StreamConnection, name, _waits)
    return monkeypatch


def _waits(*args: Any) -> None:
    raise AssertionError("the master waits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_a_copy_has_the_same_elements_and_nothing_waits_for_it(
    direct: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    there = x.to("node:0")
    copies = [
        there.to("node:1"),
        there.t().to("node:1"),
        there[1:, ::2].to("node:1"),
        there[:, :0].to("node:1"),
    ]
    if dtype.is_complex:
        copies += [there.conj().to("node:1")]
    direct.undo()
    expected = [x, x.t(), x[1:, ::2], x[:, :0], x.conj()]
    for copy, like in zip(copies, expected, strict=False):
        local = like.clone()
        assert (copy.device.index, copy.dtype) == (1, dtype)
        assert copy.stride() == local.stride() or not copy.numel()
        assert torch.equal(copy.cpu(), local)


def test_a_copy_is_made_only_once(master: Master) -> None:
    x = torch.arange(6.0, device="node:0")
    for options, last in (({}, "receive"), ({"dtype": torch.float64}, "aten._to_copy")):
        x.to("node:1", **options)
        with pytest.raises(shoal.RemoteOpError, match=rf"before it, the node did: .*{last}\n"):
            master.call("node:1", int, "one")
    assert x.cpu().resize_(9).shape == (9,)


def test_slices_of_one_matrix_begin_at_their_own_elements(master: Master) -> None:
    for dtype in (torch.float32, torch.complex64, torch.uint8):
        local = torch.arange(200).reshape(40, 5).to(dtype)
        there = local.to("node:0")
        for first in range(36):
            mine, here = there[first : first + 2], local[first : first + 2]
            for copy in (mine.to("node:1"), mine.t().to("node:1")):
                assert torch.equal(copy.as_strided((10,), (1,), 0).cpu(), here.reshape(-1))


def test_memory_of_large_copies_is_used_again(master: Master) -> None:
    x = torch.arange(200_000.0, device="node:0")
    places = set()
    for step in range(20):
        copy = (x + step).cpu()
        assert torch.equal(copy, torch.arange(200_000.0) + step)
        places.add(copy.data_ptr())
    assert len(places) < 10
    first, second = x.cpu(), x.cpu()
    first.zero_()
    assert torch.equal(second, torch.arange(200_000.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
def test_large_tensors_arrive_as_they_were(master: Master, dtype: torch.dtype) -> None:
    x = (torch.arange(700_000).reshape(700, 1000) % 5).to(dtype)
    there = x.to("node:0")
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t.expand(3, 700, 1000)
    ]  # fmt: skip
    replies = [master.fetch([view(there)]) for view in views]
    there.zero_()
    for view, reply in zip(views, replies, strict=True):
        (copy,) = reply.wait()
        assert (copy.stride(), copy.dtype) == (view(x).clone().stride(), dtype)
        assert torch.equal(copy, view(x))


@pytest.mark.parametrize("count", [3, 10_000, 60_000, 1_000_000])
def test_what_was_copied_may_be_changed_at_once(master: Master, count: int) -> None:
    x = torch.arange(float(count), device="node:0")
    copy = x.to("node:1")
    x.zero_()
    assert torch.equal(copy.cpu(), torch.arange(float(count)))
    assert not x.any().item()


def test_copies_into_a_tensor_convert_and_repeat(direct: pytest.MonkeyPatch) -> None:
    to = torch.zeros(2, 3, dtype=torch.float64, device="node:1")
    row = torch.tensor([1.5, 2.5, 3.5], device="node:0")
    to.copy_(row)
    narrow = row.to("node:1", torch.int32)
    direct.undo()
    assert to.tolist() == [[1.5, 2.5, 3.5]] * 2
    assert (narrow.dtype, narrow.tolist()) == (torch.int32, [1, 2, 3])


def test_gradients_go_back_the_way_that_values_came(master: Master) -> None:
    x = torch.ones(3, device="node:0", requires_grad=True)
    (x * 2).to("node:1").mul(3).to("node:0").sum().backward()
    assert x.grad is not None
    assert x.grad.device.index == 0
    assert x.grad.tolist() == [6, 6, 6]


def test_a_failure_travels_with_what_is_copied_and_is_told_once(master: Master) -> None:
    bad = torch.ones(3, device="node:0")[torch.tensor([7], device="node:0")]  # the line that fails
    there = bad.to("node:1")
    back = (there + 1).to("node:0")
    for tensor in (there, back):
        with pytest.raises(shoal.RemoteOpError, match="the line that fails") as caught:
            tensor.tolist()
        assert caught.value.worker == "node0"
    master.synchronize()
    assert torch.ones(2, device="node:0").to("node:1").tolist() == [1, 1]


def test_a_failure_that_was_copied_is_unseen_until_somebody_looks(master: Master) -> None:
    bad = torch.ones(3, device="node:0")[torch.tensor([7], device="node:0")]
    there = bad.to("node:1")
    with pytest.raises(shoal.RemoteOpError, match=r"index 7 is out of bounds[\s\S]*\Z") as caught:
        master.synchronize()
    assert "more failed" not in str(caught.value)
    master.synchronize()
    with pytest.raises(shoal.RemoteOpError):
        there.sum().item()


def test_copies_are_bounded_by_what_the_receiver_has_taken(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_COPY_BYTES", 1 << 20)
    x, busy = torch.ones(100_000, device="node:0"), torch.zeros(300, 300, device="node:1")
    for _ in range(20):
        busy = busy @ busy
        y = x.to("node:1")
        assert master._nodes[1].streams[0].transfers.expected <= 1 << 20
    assert y.sum().item() == 100_000


def test_a_question_that_depends_on_a_copy_finds_it_sent(master: Master) -> None:
    for _ in range(20):
        x = torch.arange(5, device="node:0")
        assert x.to("node:1").nonzero().tolist() == [[1], [2], [3], [4]]


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_of_two_nodes_are_as_local_ones(master: Master, seed: int) -> None:
    draw = random.Random(seed)
    there = [torch.full((draw.choice([4, 9000]),), float(i), device=f"node:{i % 2}") for i in range(6)]
    here = [each.cpu() for each in there]
    copying.random_steps(draw, there, here, 2, 300)
    assert all(torch.equal(each.cpu(), local) for each, local in zip(there, here, strict=True))


def test_three_nodes_copy_at_random_and_go_on_without_one_that_was_killed(start: Start) -> None:  # noqa: F811
    program = start(copying.loses_a_node_of_three)
    assert program.told() == "computed"
    assert program.told() == "lost"
    assert program.told() == "done"
    assert program.ended() == 0


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2 if os.environ.get("STRESS") == "short" else 20))
def test_nodes_are_killed_in_copies(start: Start, seed: int) -> None:  # noqa: F811
    program = start([copying.loses_a_node_of_three, copying.loses_a_node_at_a_large_copy][seed % 2])
    while program.told() != "done":
        pass
    assert program.ended() == 0
