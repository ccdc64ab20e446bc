"""Update of the tables and the picture of docs/benchmark.md from a run."""

from __future__ import annotations

import re
from pathlib import Path

from .case import Size
from .picture import draw
from .result import BenchResult, Setting
from .table import markdown

SIZES = [Size.parse(text) for text in ("8", "16K", "1M", "25M", "64M", "256M")]
SETTINGS = [Setting("all_reduce", "fp32", ranks) for ranks in (2, 4)]
PAGE = "docs/benchmark.md"
PICTURE = "docs/all_reduce.png"


def rewrite(result: BenchResult, root: Path) -> None:
    """Write the measured tables into the page, and the picture if all settings were measured."""
    page = root / PAGE
    text = page.read_text()
    measured = [setting for setting in SETTINGS if setting in result.cells]
    for setting in measured:
        sizes = [size for size in SIZES if size in result.cells[setting]]
        text = replace_section(text, setting.stem, markdown(result, setting, sizes))
    if measured == SETTINGS:
        draw(result, SETTINGS, root / PICTURE)
        text = replace_section(
            text, "all_reduce-picture", "![all_reduce: time and bandwidth](all_reduce.png)"
        )
    page.write_text(text)


def replace_section(text: str, name: str, body: str) -> str:
    """Replace the text between the markers of section ``name``."""
    pattern = rf"(<!-- {re.escape(name)}: begin.*?-->\n).*?(<!-- {re.escape(name)}: end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{body}\n{match[2]}", text, flags=re.DOTALL)
