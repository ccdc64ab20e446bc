"""Reductions of tensors that are ordinary on some ranks: chunk by chunk, through staging buffers."""

from __future__ import annotations

import random

import pytest
import torch

from shoal.group import ProcessGroup
from shoal.testing.conformance.reference import data, identical, op_of

from .worlds import Worlds

#: bytes that are reduced at a time, and how many such chunks are on their way (cpp/collectives/all_reduce.cc)
CHUNK = 64 * 1024
SLOTS = 4
LENGTHS = [
    4112,
    CHUNK - 16,
    CHUNK,
    CHUNK + 16,
    SLOTS * CHUNK - 48,
    SLOTS * CHUNK + 16,
    (SLOTS + 1) * CHUNK,
    (2 * SLOTS + 3) * CHUNK + 1040,
]
CASES = [
    (torch.float32, "sum"),
    (torch.float32, "product"),
    (torch.float16, "avg"),
    (torch.bfloat16, "sum"),
    (torch.float64, "premul_sum"),
    (torch.complex64, "avg"),
    (torch.complex128, "product"),
    (torch.bool, "sum"),
    (torch.int8, "avg"),
    (torch.uint8, "max"),
    (torch.int64, "bxor"),
]
GUARD = 3  # elements around a tensor that nobody may touch, so that it begins anywhere in a cache line


class Room:
    """A tensor in the middle of another one, registered or not."""

    def __init__(self, group: ProcessGroup, content: torch.Tensor, registered: bool) -> None:
        count, dtype = content.numel() + 2 * GUARD, content.dtype
        self._whole = group.empty(count, dtype=dtype) if registered else torch.empty(count, dtype=dtype)
        self._whole.view(torch.uint8).fill_(0x55 if dtype is not torch.bool else 1)
        self.tensor = self._whole[GUARD:-GUARD]
        self.tensor.copy_(content)

    def intact(self) -> bool:
        around = torch.cat([self._whole[:GUARD], self._whole[-GUARD:]]).view(torch.uint8)
        return bool(around.eq(0x55 if self._whole.dtype is not torch.bool else 1).all())


@pytest.mark.parametrize(
    ("size", "registered"), [(2, ()), (2, (0,)), (2, (1,)), (3, ()), (3, (1,)), (4, (0, 3))]
)
def test_they_give_the_bits_of_registered_tensors_and_touch_nothing_else(
    worlds: Worlds, size: int, registered: tuple[int, ...]
) -> None:
    def collective(group: ProcessGroup) -> None:
        rank = group.rank
        for number, length in enumerate(LENGTHS):
            for dtype, name in CASES:
                count = length // dtype.itemsize
                given = data(dtype, count, rank, name)
                op = op_of(rank, name)
                expected = group.empty(count, dtype=dtype).copy_(given)
                group.all_reduce(expected, op).wait()
                room = Room(group, given, rank in registered)
                assert identical(group.all_reduce(room.tensor, op).wait(), expected), (dtype, name, length)
                assert room.intact()
                root = number % size
                room.tensor.copy_(given)
                group.reduce(room.tensor, root, op).wait()
                assert identical(room.tensor, expected if rank == root else given), (dtype, name, length)
                assert room.intact()

    worlds(size).run(collective)


@pytest.mark.concurrency
@pytest.mark.parametrize("size", [2, 4])
def test_many_in_flight_are_each_right_and_equal_in_every_run(worlds: Worlds, size: int) -> None:
    def collective(group: ProcessGroup) -> None:
        own = random.Random(group.rank)
        for _ in range(10):
            lengths = [LENGTHS[i % len(LENGTHS)] // 4 for i in range(12)]
            given = [data(torch.float32, n, group.rank) for n in lengths]
            tensors = [Room(group, x, own.random() < 0.3).tensor for x in given]
            futures = [group.all_reduce(x) for x in tensors]
            for i in own.sample(range(len(futures)), len(futures)):
                futures[i].wait()
            for n, x in zip(lengths, tensors, strict=True):
                total = data(torch.float32, n, 0).clone()
                for rank in range(1, size):
                    total += data(torch.float32, n, rank)
                assert torch.equal(x, total)

    worlds(size).run(collective)
