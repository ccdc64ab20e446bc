"""Numbers and names of ranks in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, or ``ranks 0, 2-5`` for 0, 2, 3, 4 and 5."""
    ordered = sorted(ranks)
    return ("rank " if len(ordered) == 1 else "ranks ") + numbers(ordered)


def numbers(ordered: Iterable[int]) -> str:
    """``0, 2-5`` for 0, 2, 3, 4 and 5, which come in this order."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    short = (map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"] for run in runs)
    return ", ".join(word for words in short for word in words)
