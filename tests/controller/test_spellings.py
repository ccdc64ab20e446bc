"""The words of the mode's first proposal: nodes, typed constructors, and what sends tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master, RemoteTensor

dist = shoal.distributed

TYPES = {
    "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "Int": torch.int32,
    "Long": torch.int64, "Short": torch.int16,
}  # fmt: skip


def test_the_example_of_the_proposal_runs_on_processors(master: Master) -> None:
    x = dist.FloatTensor(20, 20).fill_(4)
    here = torch.randn(20, 20)
    y = here.dist_send()  # type: ignore[attr-defined]
    z = x + y
    assert (z.get_node(), z.get_device()) == (0, -1)
    with dist.node(1):
        a = dist.FloatTensor(10)
        assert (a.get_node(), a.get_device()) == (1, -1)
        q = x + y
        assert (q.get_node(), q.get_device()) == (0, -1)
    assert torch.equal(z.dist_receive(), here + 4)


@pytest.mark.parametrize("name", TYPES)
def test_there_is_a_constructor_for_each_type(master: Master, name: str) -> None:
    constructor = getattr(dist, f"{name}Tensor")
    assert hasattr(torch, f"{name}Tensor")
    for made, shape in (
        (constructor(2, 3), (2, 3)),
        (constructor(), (0,)),
        (constructor(torch.Size([4])), (4,)),
        (constructor([[1, 0]]), (1, 2)),
        (constructor(torch.ones(5)), (5,)),
    ):
        assert isinstance(made, constructor)
        assert (made.shape, made.dtype, made.get_node()) == (shape, TYPES[name], 0)
    assert constructor([[1, 0]]).tolist() == [[1, 0]]
    other = dist.IntTensor if name == "Long" else dist.LongTensor
    assert not isinstance(constructor(1), other)
    assert not isinstance(torch.ones(1, dtype=TYPES[name]), constructor)


def test_a_constructor_refuses_what_it_does_not_know(master: Master) -> None:
    with pytest.raises(TypeError, match="FloatTensor takes sizes, a sequence of numbers, or a tensor"):
        dist.FloatTensor(2, [3])


def test_a_node_is_chosen_for_factories_and_what_is_sent(master: Master) -> None:
    local = torch.arange(3.0)
    with dist.node(1):
        made = torch.ones(3)
        assert made.dist_send() is made
        sent = local.dist_send()  # type: ignore[attr-defined]
        with dist.node(0):
            assert local.dist_send().get_node() == 0  # type: ignore[attr-defined]
        assert [each.get_node() for each in (made, sent, dist.LongTensor(2))] == [1, 1, 1]
        assert local.dist_send(0).get_node() == 0  # type: ignore[attr-defined]
    assert local.dist_send().get_node() == 0  # type: ignore[attr-defined]
    assert isinstance(sent, RemoteTensor)
    assert sent.tolist() == [0, 1, 2]
    assert torch.ones(1).device.type == "cpu"
    with pytest.raises(shoal.UsageError, match="there is no node:7"):
        dist.node(7)


@pytest.mark.parametrize(
    ("backend", "engine", "transport"),
    [(None, "native", None), ("gloo", "native", None), ("tcp", "native", "tcp")],
)
def test_the_backend_is_that_of_collectives(
    backend: str | None, engine: str, transport: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("shoal.controller.api.master.init_master_worker", lambda **how: given.append(how))
    dist.init_master_worker(backend=backend, workers=2)
    assert given == [{"backend": engine, "transport": transport, "workers": 2}]


def test_a_transport_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(shoal.UsageError, match="transport='udp': expected one of"):
        shoal.init_master_worker(workers=1, transport="udp")


def test_a_backend_that_is_not_here_is_refused_before_anything_starts() -> None:
    with pytest.raises(shoal.UsageError, match=r"\(backend='mpi'\): workers=: MPI's launcher must start"):
        dist.init_master_worker(backend="mpi", workers=1)
    with pytest.raises(AttributeError, match="has no attribute 'StringTensor'"):
        dist.StringTensor  # noqa: B018
