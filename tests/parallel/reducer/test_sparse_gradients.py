"""Sparse gradients of embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from tests.parallel.models import fixed, on_ranks


class Words(nn.Module):
    """A table with sparse gradients, one with dense ones, and a layer."""

    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag] = nn.Embedding) -> None:
        super().__init__()
        self.table = kind(50, 4, sparse=True)
        self.dense = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 2)
        fixed(self.double())

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        hidden = self.dense(x).mean(1)
        if use:
            table = self.table(x)
            hidden = hidden + (table if table.ndim == 2 else table.mean(1))
        return self.head(hidden)


def words(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 50, (3 + rank, 5), generator=random)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("size", [1, 3])
def test_sparse_gradients_stay_sparse_and_are_averaged(kind: type[nn.Module], size: int) -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        model = shoal.DistributedDataParallel(Words(kind), group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(words(step, group.rank)).square().sum().backward()
            assert model.module.table.weight.grad.is_sparse
            assert not model.module.dense.weight.grad.is_sparse
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    results = on_ranks(size, rank)
    reference = Words(kind)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for number in range(size):
            (reference(words(step, number)).square().sum() / size).backward()
        optimizer.step()
    for mine in results:
        for a, b, c in zip(mine, results[0], reference.parameters(), strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)


def test_a_table_that_some_ranks_do_not_use() -> None:
    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor | None]:
        model = shoal.DistributedDataParallel(Words(), group=group, find_unused_parameters=True)
        gradients = []
        for users in ((0,), (), (0, 1)):
            model.zero_grad()
            model(words(1, group.rank), group.rank in users).sum().backward()
            gradient = model.module.table.weight.grad
            gradients.append(None if gradient is None else gradient.to_dense())
        return gradients

    first, second = on_ranks(2, rank)
    assert first[1] is second[1] is None
    for step, users in ((0, (0,)), (2, (0, 1))):
        reference = Words()
        for number in users:
            (reference(words(1, number), True).sum() / 2).backward()
        expected = reference.table.weight.grad.to_dense()
        torch.testing.assert_close(first[step], expected)
        assert torch.equal(first[step], second[step])


def test_a_sparse_gradient_of_something_that_is_no_embedding_is_made_dense() -> None:
    class Lookup(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(rows, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=True)

    def rank(group: shoal.ProcessGroup) -> None:
        for rows in (5, 50_000):
            model = shoal.DistributedDataParallel(Lookup(rows), group=group)
            model(torch.tensor([1, 2])).sum().backward()
            assert model.module.table.grad[:4].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3]

    on_ranks(2, rank)


def test_a_dense_gradient_where_a_sparse_one_is_expected_is_named() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) @ self.table.weight.t()

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(Tied(), group=group)
        with pytest.raises(UsageError, match=r"'table\.weight' on rank \d is dense, .*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()

    on_ranks(2, rank)
