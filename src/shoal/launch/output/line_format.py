"""The prefixes of lines of output: the time, and the ranks that wrote the line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ...common.formatting import format_ranges
from ..ranks.rank import JobProcess, rank_names

#: ANSI colours of the labels of successive ranks, all readable on black and on white
_COLOURS = (36, 33, 35, 32, 34, 31)
#: ANSI code of the label of several ranks
_BOLD = 1


@dataclass(frozen=True)
class LineFormat:
    """The options for lines of output: ``--collapse``, ``--timestamps``, and not ``--no-prefix``."""

    label: bool = True
    collapse: bool = False
    timestamps: bool = False

    def time(self) -> bytes:
        """The present local time as a prefix, ``2026-11-29T14:03:32.123 ``; empty without timestamps."""
        if not self.timestamps:
            return b""
        return f"{datetime.now().isoformat(timespec='milliseconds')} ".encode()

    def ranks(self, ranks: Sequence[JobProcess], size: int, *, terminal: bool) -> bytes:
        """The ranks of a line as a prefix, ``[3] `` or ``[0-2,5,3.1] ``; empty without labels.

        Args:
            size: number of processes of the job, for the width.
            terminal: whether to use colours, unless ``NO_COLOR`` is set.
        """
        if not self.label:
            return b""
        text = f"[{_compact(rank_names(ranks)):>{self._label_width(size)}}]"
        if terminal and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[ranks[0].slot % len(_COLOURS)] if len(ranks) == 1 else _BOLD
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return f"{text} ".encode()

    def width(self, size: int) -> int:
        """Number of columns that the prefixes take in a job of ``size`` processes."""
        return len(self.time()) + (self._label_width(size) + len("[] ") if self.label else 0)

    def _label_width(self, size: int) -> int:
        """The same for every initial rank, and for the line of all of them."""
        return len(_compact(format_ranges(range(size)) if self.collapse else str(size - 1)))


def _compact(names: str) -> str:
    return names.replace(", ", ",")
