"""Common parts of benchmarks of several libraries: options, turns, medians, bars, results.

In each round every library has a turn, which returns figures by name; a library omits figures that it lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from panels import draw

import shoal

Figures = dict[str, float]
#: a data class with the amounts of work
W = TypeVar("W")

#: actor libraries, measured in separate environments if those are given
ACTORS = {"ray": "Ray and torch", "monarch": "torchmonarch and torch"}


class Bar(NamedTuple):
    """A bar for one figure of one row.

    Attributes:
        most: upper limit; None if there is a lower one.
        least: lower limit of a rate.
        of: (row, figure) that ``most`` is a multiple of; None if it is absolute.
    """

    row: str
    figure: str
    most: float | None = None
    least: float = 0.0
    of: tuple[str, str] | None = None


def options(doc: str | None, work: W, texts: Mapping[str, str]) -> tuple[argparse.Namespace, W]:
    """Parse the command line, with `work` as the defaults; return the options and the amounts of work."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    for field, text in texts.items():
        default = getattr(work, field)
        parser.add_argument(f"--{field}", type=int, default=default, help=f"{text} ({default:,})")
    for name, needs in ACTORS.items():
        parser.add_argument(f"--{name}", help=f"the Python of an environment that has {needs}")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="PNG file for a picture of the medians")
    given = parser.parse_args()
    return given, dataclasses.replace(work, **{field: getattr(given, field) for field in texts})


def actors(options: argparse.Namespace) -> dict[str, str]:
    """The Python of each actor library that takes part."""
    named = {name: getattr(options, name) for name in ACTORS}
    for name, python in named.items():
        if not python:
            print(f"{name}: left out, because --{name} names no environment that has it")
    return {name: python for name, python in named.items() if python}


def turn_of(script: str, name: str, python: str, work: Any) -> Figures:
    """Run one turn of one library in a process: a script that prints its figures in its last line."""
    path = Path(__file__).with_name(script)
    words = json.dumps(dataclasses.asdict(work))
    done = subprocess.run([python, str(path), name, words], stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def in_turns(rounds: int, contenders: Mapping[str, Callable[[int], Figures]]) -> dict[str, list[Figures]]:
    """Return each library's figures of each round; a turn is called with the number of its round."""
    taken: dict[str, list[Figures]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, take_turn in contenders.items():
            taken[name].append(take_turn(number))
            print(
                f"{name:10}", *(f"{what} {value:.4g}" for what, value in taken[name][-1].items()), sep="  ",
                flush=True,
            )  # fmt: skip
    return taken


def medians_of(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    return {
        name: {
            what: statistics.median(each[what] for each in figures if what in each) for what in figures[-1]
        }
        for name, figures in rounds.items()
    }


def against_bars(medians: Mapping[str, Mapping[str, float]], bars: Sequence[Bar]) -> dict[str, float]:
    """The ratio of each figure to its bar, where at least 1 means that the bar is met."""
    result: dict[str, float] = {}
    for bar in bars:
        try:
            value = medians[bar.row][bar.figure]
            anchor = 1.0 if bar.of is None else medians[bar.of[0]][bar.of[1]]
        except KeyError:  # the row did not take part
            continue
        if bar.most is None:
            result[f"{bar.row}: {bar.figure} at least {bar.least:,}"] = value / bar.least
            continue
        words = f"{bar.most}" if bar.of is None else f"{bar.most} of {' '.join(bar.of)}"
        result[f"{bar.row}: {bar.figure} at most {words}"] = bar.most * anchor / value
    return result


def conclude(
    options: argparse.Namespace,
    work: Any,
    rounds: Mapping[str, Sequence[Figures]],
    bars: Sequence[Bar],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the ratios to the bars and write the output files; ``more`` is added to the JSON."""
    medians = medians_of(rounds)
    ratios = against_bars(medians, bars)
    for bar, ratio in ratios.items():
        print(f"{bar}: {ratio:.2f} {'met' if ratio >= 1 else 'MISSED'}")
    if options.out is not None:
        settings = {
            "versions": {"shoal": shoal.__version__, "torch": torch.__version__},
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            **dataclasses.asdict(work),
        }
        result = {"settings": settings, "rounds": rounds, "medians": medians, **(more or {})}
        result["times as good as the bars"] = ratios
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture is not None:
        draw(medians, options.picture)
