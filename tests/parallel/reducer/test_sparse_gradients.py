"""Sparse gradients of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from tests.parallel.models import Words, fixed, loss_of, part, sentences
from tests.parallel.training import assert_as_simulated, on_ranks, steps, wrapped


def words(kind: type[nn.Module] = nn.Embedding) -> Any:
    return fixed(Words(kind).double())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("size", [1, 3])
def test_sparse_gradients_stay_sparse_and_are_averaged(kind: type[nn.Module], size: int) -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        plain = steps(sentences(4), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in plain(model, place):
            if hasattr(model, "module"):
                assert [p.grad.is_sparse for p in model.parameters()] == [True, False, False, False]
            yield

    assert_as_simulated(program, size, make=lambda: words(kind))


def test_a_table_that_some_ranks_do_not_use() -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        for batch, users in zip(sentences(3), [(0,), (), (0, 1)], strict=True):
            model.zero_grad()
            loss_of(model, part(batch, place), place.rank in users).backward()
            yield

    assert_as_simulated(program, make=words, find_unused_parameters=True)


@on_ranks(2)
def test_a_sparse_gradient_of_something_that_is_no_embedding_is_made_dense(group: shoal.ProcessGroup) -> None:
    class Lookup(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(rows, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=True)

    for rows in (5, 50_000):
        model = wrapped(group, Lookup(rows))
        model(torch.tensor([1, 2])).sum().backward()
        assert model.module.table.grad[:4].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3]


@on_ranks(2)
def test_a_dense_gradient_where_a_sparse_one_is_expected_is_named(group: shoal.ProcessGroup) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) @ self.table.weight.t()

    model = wrapped(group, Tied())
    with pytest.raises(UsageError, match=r"'table\.weight' on rank \d is dense, .*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
