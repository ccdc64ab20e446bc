"""Print the model's tables, plot it, and check it against measured points.

python -m benchmarks.model                                   # tables, and out/model.png
python -m benchmarks.model --write                           # the tables into docs/algorithms.md
python -m benchmarks.model --measured out/hosts.json         # fit up to 8 ranks, predict the others
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from . import calibrate, report
from .parameters import EXAMPLES

ROOT = Path(__file__).resolve().parent.parent.parent
FITTED = 8  # maximum number of ranks of the points used for the fit


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The cost of all-reduce on 8 to 4,096 hosts, computed and not measured."
    )
    parser.add_argument(
        "--measured", type=Path, help="a record of benchmarks/hosts.py, or of scaling.py over TCP"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/algorithms.md")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the picture")
    arguments = parser.parse_args()
    console = Console()
    if arguments.measured is not None:
        points = calibrate.read(arguments.measured)
        gamma = next(iter(EXAMPLES.values())).gamma
        machine = calibrate.fit([point for point in points if point.ranks <= FITTED], gamma)
        report.show_fit(points, machine, FITTED, console)
        return
    for name, machine in EXAMPLES.items():
        report.show_choice(name, machine, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.draw(arguments.out / "model.png")
    console.print(f"wrote model.png to {arguments.out}")
    if arguments.write:
        page = ROOT / "docs" / "algorithms.md"
        page.write_text(report.rewritten(page.read_text()))
        console.print(f"wrote the tables into {page}")


if __name__ == "__main__":
    main()
