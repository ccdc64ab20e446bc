"""Tables as plain text, for messages and dumps."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table as text; the first column and the state are left-aligned, the others right-aligned."""
    # Imported here, as most programs never need it.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        left = number == 0 or heading in ("state", "at", "of")
        drawn.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None, markup=False, emoji=False, highlight=False).print(
        drawn
    )
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())
