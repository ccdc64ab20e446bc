"""Inputs may share memory with outputs: collectives of random views of one memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from shoal.group import ProcessGroup
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

SIZE = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
COUNTS = (0, 1, 3, 1024, 20_000, 70_000)


class Views:
    """Views of one memory, chosen alike on all ranks.

    Outputs are disjoint.  Inputs of ``count`` elements lie anywhere, often where an output lies.
    """

    def __init__(self, group: ProcessGroup, rng: random.Random, count: int, dtype: torch.dtype) -> None:
        self.count = count
        self._rng = rng
        self._slot = 2 * count + 1
        elements = 2 * SIZE * self._slot
        self.memory = (
            group.empty(elements, dtype=dtype) if rng.random() < 0.6 else torch.empty(elements, dtype=dtype)
        )
        self.memory.copy_((torch.arange(elements) * (group.rank + 3) + 17 * group.rank) % 11)
        self._slots = rng.sample(range(2 * SIZE), 2 * SIZE)

    def _at(self, offset: int) -> torch.Tensor:
        step = self._rng.choice((1, 1, 1, 2))
        return self.memory[offset : offset + step * self.count : step]

    def output(self, index: int = 0) -> torch.Tensor:
        return self._at(self._slots[index] * self._slot + self._rng.randrange(2))

    def outputs(self) -> list[torch.Tensor]:
        return [self.output(index) for index in range(SIZE)]

    def input(self) -> torch.Tensor:
        near = self._slots[0] * self._slot
        anywhere = self._rng.randrange(len(self.memory) - 2 * self.count)
        return self._at(self._rng.choice((near, anywhere)))

    def whole(self) -> torch.Tensor:
        """Return a contiguous view with a part for each rank."""
        offset = self._rng.choice((0, 0, self.count // 2, self._slot))
        return self.memory[offset : offset + SIZE * self.count]

    def inputs(self) -> list[torch.Tensor]:
        return [self.input() for _ in range(SIZE)]


#: What a rank gets: for each output the tensors that are added up for it.
Expected = Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]


def check(group: ProcessGroup, views: Views, rng: random.Random) -> None:
    """Call a random collective, and compare its outputs with what was in the inputs of all ranks before."""
    rank, count, root = group.rank, views.count, rng.randrange(SIZE)

    def of_all_ranks(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return group.all_gather_object(torch.cat([x.flatten() for x in inputs])).wait()

    def parts_for(receiver: int, before: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x[receiver * count : (receiver + 1) * count] for x in before]

    def all_reduce() -> Expected:
        x = views.output()
        before = of_all_ranks(x)
        group.all_reduce(x).wait()
        return [(x, before)]

    def reduce() -> Expected:
        x = views.output()
        before = of_all_ranks(x)
        group.reduce(x, root).wait()
        return [(x, before if rank == root else [before[rank]])]

    def broadcast() -> Expected:
        x = views.output()
        before = of_all_ranks(x)
        group.broadcast(x, root).wait()
        return [(x, [before[root]])]

    def all_gather() -> Expected:
        out, x = views.outputs(), views.input()
        before = of_all_ranks(x)
        group.all_gather(out, x).wait()
        return [(out[i], [before[i]]) for i in range(SIZE)]

    def all_gather_single() -> Expected:
        out, x = views.whole(), views.input()
        before = of_all_ranks(x)
        group.all_gather_single(out, x).wait()
        return [(out, [torch.cat(before)])]

    def gather() -> Expected:
        out, x = views.outputs(), views.input()
        before = of_all_ranks(x)
        group.gather(x, out if rank == root else None, root).wait()
        return [(out[i], [before[i]]) for i in range(SIZE) if rank == root]

    def scatter() -> Expected:
        out, inputs = views.output(), views.inputs()
        before = of_all_ranks(*inputs)
        group.scatter(out, inputs if rank == root else None, root).wait()
        return [(out, [parts_for(rank, before)[root]])]

    def reduce_scatter() -> Expected:
        out, inputs = views.output(), views.inputs()
        before = of_all_ranks(*inputs)
        group.reduce_scatter(out, inputs).wait()
        return [(out, parts_for(rank, before))]

    def reduce_scatter_single() -> Expected:
        out, x = views.output(), views.whole()
        before = of_all_ranks(x)
        group.reduce_scatter_single(out, x).wait()
        return [(out, parts_for(rank, before))]

    def all_to_all() -> Expected:
        out = views.outputs()
        inputs = out if root == 0 else views.inputs()
        before = of_all_ranks(*inputs)
        group.all_to_all(out, inputs).wait()
        return [(out[i], [part]) for i, part in enumerate(parts_for(rank, before))]

    def all_to_all_single() -> Expected:
        x = views.whole()
        out = x if root == 0 else views.whole()
        before = of_all_ranks(x)
        group.all_to_all_single(out, x).wait()
        return [(out, [torch.cat(parts_for(rank, before))])]

    collective = rng.choice(
        (
            all_reduce, reduce, broadcast, all_gather, all_gather_single, gather, scatter, reduce_scatter,
            reduce_scatter_single, all_to_all, all_to_all_single,
        )
    )  # fmt: skip
    for output, added in collective():
        total = torch.stack([x.flatten() for x in added]).sum(0, dtype=output.dtype)
        assert torch.equal(output.flatten(), total), collective.__name__


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 50), pytest.param(2, 600, marks=pytest.mark.stress)], ids=["short", "long"]
)
def test_random_views_of_one_memory(worlds: Worlds, topology: str, seed: int, rounds: int) -> None:
    def collectives(group: ProcessGroup) -> None:
        rng = random.Random(seed)
        group.barrier().wait()  # later calls may take the short path
        for _ in range(rounds):
            views = Views(group, rng, rng.choice(COUNTS), rng.choice(DTYPES))
            check(group, views, rng)

    worlds(SIZE, **topology_options(topology, SIZE)).run(collectives)
