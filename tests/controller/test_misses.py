"""Operations of new kinds: they are counted, and too many are told of."""

from __future__ import annotations

import torch

from shoal.controller import Master
from shoal.controller.calls import MANY, misses_in_words


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


def test_too_many_are_told_of() -> None:
    assert misses_in_words(MANY - 1, MANY - 1) is None
    assert misses_in_words(MANY, MANY // 10) is None
    text = misses_in_words(MANY, MANY // 10 + 1)
    assert text is not None
    assert f"{MANY // 10 + 1} of {MANY} operations on nodes were the first" in text
