"""The bars of benchmarks/rpc.py: what a call may cost at most, and how far its figures are from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NO_OP, _ECHO, _LARGE = "no-op [us, p50]", "echo 20x20 [us, p50]", "64 MB [ms]"


class Bar(NamedTuple):
    """A bar for one figure of one row.

    Attributes:
        most: it may be at most so much; None: it is a rate.
        least: the rate must be at least so much.
        of: the row and the figure of which ``most`` is a multiple; None: it is a number.
    """

    row: str
    figure: str
    most: float | None = None
    least: float = 0.0
    of: tuple[str, str] | None = None


#: 64 MB have to move at 0.8 of the speed of their anchor: over TCP a raw loop, on one host a memcpy
BARS = (
    Bar("shoal", _NO_OP, 100),
    Bar("shoal", _NO_OP, 0.5, of=("torch", _NO_OP)),
    Bar("shoal", _ECHO, 0.5, of=("torch", _ECHO)),
    Bar("shoal", "1 caller [calls/s]", least=20_000),
    Bar("shoal", "4 callers [calls/s]", least=25_000),
    Bar("shoal", _LARGE, 1 / 0.8, of=("floor", "64 MB to shared memory, warm [ms]")),
    Bar("shoal tcp", _NO_OP, 150),
    Bar("shoal tcp", _NO_OP, 0.5, of=("torch tcp", _NO_OP)),
    Bar("shoal tcp", _ECHO, 0.5, of=("torch tcp", _ECHO)),
    Bar("shoal tcp", _LARGE, 1 / 0.8, of=("floor", "64 MB over tcp, warm [ms]")),
    Bar("shoal tcp", _LARGE, 1 / 0.8, of=("floor", "64 MB over tcp, fresh [ms]")),
)


def against_bars(medians: Mapping[str, Mapping[str, float]], bars: Sequence[Bar] = BARS) -> dict[str, float]:
    """How many times each figure is as good as its bar: from 1 on the bar is met."""
    result: dict[str, float] = {}
    for bar in bars:
        try:
            value = medians[bar.row][bar.figure]
            anchor = 1.0 if bar.of is None else medians[bar.of[0]][bar.of[1]]
        except KeyError:  # a row that did not take part
            continue
        if bar.most is None:
            result[f"{bar.row}: {bar.figure} at least {bar.least:,}"] = value / bar.least
            continue
        words = f"{bar.most}" if bar.of is None else f"{bar.most} of {' '.join(bar.of)}"
        result[f"{bar.row}: {bar.figure} at most {words}"] = bar.most * anchor / value
    return result
