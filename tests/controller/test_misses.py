"""Operations of new kinds: they are counted, and too many are told of."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.tensor.calls import MIN_OPERATIONS_TO_WARN, misses_in_words


def test_operations_of_new_kinds_are_counted(master: Master) -> None:
    def misses() -> int:
        return master.stats()[0]["misses"]

    x = torch.ones(3, 41, device="node:0")
    before = misses()
    y = x * 2
    assert misses() == before + 1
    for _ in range(5):
        y = x * 3.5 + y  # another kind of number is one of another kind, and its value is not
    counted = misses()
    assert before + 2 <= counted <= before + 3
    for i in range(20):
        y = x * (i + 0.5) + y
    assert misses() == counted


def test_what_is_refused_is_neither_issued_nor_a_miss(master: Master) -> None:
    x = torch.ones(3, 42, device="node:0")
    before = master.stats()[0]
    for _ in range(5):
        with pytest.raises(RuntimeError):
            x @ x
        with pytest.raises(shoal.DeviceMismatch):
            x + torch.ones(3, 42)
    after = master.stats()[0]
    assert [after[each] - before[each] for each in ("issued", "misses", "hits")] == [0, 0, 0]


def test_what_is_asked_is_counted_as_issued(master: Master) -> None:
    x = torch.ones(3, 43, device="node:0")
    before = master.stats()[0]
    for _ in range(3):
        x.nonzero()
    after = master.stats()[0]
    counts = {each: after[each] - before[each] for each in after}
    assert (counts["issued"], counts["asked"], counts["misses"], counts["hits"]) == (3, 3, 1, 2)


def test_bytes_and_copies_are_counted_where_they_arrive(master: Master) -> None:
    def counts() -> list[tuple[int, int]]:
        return [(each["bytes"], each["copies"]) for each in master.stats()]

    x = torch.ones(1 << 16)
    before = counts()
    there = x.to("node:0")
    master.synchronize()
    there.to("node:1")
    master.synchronize()
    grown = [(a - c, b - d) for (a, b), (c, d) in zip(counts(), before, strict=True)]
    assert x.nbytes <= grown[0][0] < 2 * x.nbytes
    assert grown[1][0] < x.nbytes
    assert [copies for _, copies in grown] == [0, 1, 0]
    assert all(each["batches"] > 0 and each["misses"] <= each["issued"] for each in master.stats())


def test_too_many_are_told_of_with_the_worst_operators() -> None:
    def missed(count: int) -> Counter[str]:
        return Counter({"aten.add.Tensor": count - 9, "aten.mm": 6, "aten.exp": 2, "aten.sum": 1})

    assert misses_in_words(MIN_OPERATIONS_TO_WARN - 1, missed(MIN_OPERATIONS_TO_WARN - 1)) is None
    assert misses_in_words(MIN_OPERATIONS_TO_WARN, missed(MIN_OPERATIONS_TO_WARN // 10)) is None
    text = misses_in_words(MIN_OPERATIONS_TO_WARN, missed(MIN_OPERATIONS_TO_WARN // 10 + 1))
    assert text is not None
    assert (
        f"{MIN_OPERATIONS_TO_WARN // 10 + 1} of {MIN_OPERATIONS_TO_WARN} operations on nodes were the first"
        in text
    )
    assert (
        f"aten.add.Tensor ({MIN_OPERATIONS_TO_WARN // 10 - 8} times), aten.mm (6 times), aten.exp (2 times)"
        in text
    )
    assert "aten.sum" not in text
    assert "pad shapes" in text
