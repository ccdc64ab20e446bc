"""Tables and plots of the model, for the terminal and docs/algorithms.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .algorithms import ALGORITHMS, Hierarchical, best, shoal
from .calibrate import Point
from .parameters import EXAMPLES, Parameters

HOSTS = (8, 16, 32, 64, 256, 1024, 4096)
SIZES = (8, 4 * 2**10, 32 * 2**10, 256 * 2**10, 2**20, 25 * 2**20, 256 * 2**20)
_SECTION = re.compile(r"(<!-- model: begin.*?-->\n).*?(<!-- model: end -->)", re.DOTALL)


def size_name(nbytes: int) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_name(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def choice(machine: Parameters) -> list[list[str]]:
    """By size and hosts: the fastest algorithm, its time, and the slowdown of shoal's algorithm."""
    rows = []
    for nbytes in SIZES:
        cells = []
        for hosts in HOSTS:
            winner, ours = best(hosts, nbytes, machine), shoal(nbytes, hosts)
            least = winner.time(hosts, nbytes, machine)
            ratio = ours.time(hosts, nbytes, machine) / least
            more = f" ({ratio:.{int(ratio < 9.95)}f})" if ratio >= 1.05 else ""
            cells.append(f"{winner.name} {time_name(least)}{more}")
        rows.append([size_name(nbytes), *cells])
    return rows


def crossovers(machine: Parameters) -> list[list[str]]:
    """By size: the numbers of hosts from which shoal takes 1.25 and 2 times as long as the fastest."""
    rows = []
    for nbytes in SIZES:
        cells = []
        for limit in (1.25, 2.0):
            slower = [
                hosts
                for hosts in (2**k for k in range(1, 13))
                if shoal(nbytes, hosts).time(hosts, nbytes, machine)
                >= limit * best(hosts, nbytes, machine).time(hosts, nbytes, machine)
            ]
            cells.append(str(min(slower)) if slower else "none to 4096")
        rows.append([size_name(nbytes), *cells])
    return rows


def costs(hosts: int, locals_: int, nbytes: int) -> list[list[str]]:
    """By algorithm: steps, and messages and megabytes that the busiest host sends."""
    rows = []
    for algorithm in (*ALGORITHMS, Hierarchical(locals_)):
        messages, moved = algorithm.sent(hosts, nbytes)
        rows.append([algorithm.name, str(algorithm.steps(hosts)), str(messages), f"{moved / 2**20:.4g} MB"])
    return rows


def show_choice(name: str, machine: Parameters, console: Console) -> None:
    table = Table(
        "tensor",
        *(f"{hosts} hosts" for hosts in HOSTS),
        title=f"fastest all-reduce over {name} (shoal: times as long)",
    )
    for row in choice(machine):
        table.add_row(*row)
    console.print(table)


def show_fit(points: Sequence[Point], machine: Parameters, fitted: int, console: Console) -> None:
    console.print(
        f"latency {time_name(machine.latency)}, overhead {time_name(machine.overhead)} a message, "
        f"{machine.gap * 1e9:.3g} ns a byte, fitted to the points of up to {fitted} ranks"
    )
    head = ("ranks", "tensor", "algorithm", "measured", "model", "error", "")
    table = Table(*head, title="all-reduce over TCP")
    for point in points:
        predicted = point.predicted(machine)
        table.add_row(
            str(point.ranks),
            size_name(point.nbytes),
            point.algorithm.name if point.algorithm else "auto",
            time_name(point.seconds),
            time_name(predicted),
            f"{predicted / point.seconds - 1:+.0%}",
            "fitted" if point.ranks <= fitted else "predicted",
        )
    console.print(table)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def markdown() -> str:
    """Return the tables of docs/algorithms.md."""
    head = ["algorithm", "steps", "messages sent", "bytes sent"]
    lines = ["64 hosts, 25 MB, the busiest host (hierarchical: of 8 ranks):", ""]
    lines += _markdown(head, costs(64, 8, 25 * 2**20))
    for name, machine in EXAMPLES.items():
        parameters = (
            f"latency {time_name(machine.latency)}, overhead {time_name(machine.overhead)} a message, "
            f"{machine.gap * 1e9:.2g} ns a byte, {machine.gamma * 1e9:.2g} ns to reduce one"
        )
        lines += [f"**{name}** ({parameters}):", ""]
        lines += _markdown(["tensor", *map(str, HOSTS)], choice(machine))
        lines += ["From how many hosts shoal's choice takes longer than the fastest:", ""]
        lines += _markdown(["tensor", "1.25 times", "2 times"], crossovers(machine))
    return "\n".join(lines[:-1])


def rewritten(page: str) -> str:
    """Return ``page`` with the section between the model's markers replaced."""
    return _SECTION.sub(lambda match: f"{match[1]}{markdown()}\n{match[2]}", page)


def draw(path: Path) -> None:
    """Plot bytes and time by hosts, log-log, for a small and a large tensor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    hosts = [2**k for k in range(3, 13)]
    name, machine = next(iter(EXAMPLES.items()))
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    for algorithm in ALGORITHMS:
        moved = [algorithm.sent(h, 25 * 2**20)[1] for h in hosts]
        axes[0].loglog(hosts, moved, "o-", label=algorithm.name)
        for axis, nbytes in ((axes[1], 8), (axes[2], 25 * 2**20)):
            times = [algorithm.time(h, nbytes, machine) for h in hosts]
            axis.loglog(hosts, times, "o-", label=algorithm.name)
    axes[0].set(title="25 MB: bytes that the busiest host sends", ylabel="bytes")
    axes[1].set(title=f"8 B, {name}", ylabel="seconds")
    axes[2].set(title=f"25 MB, {name}", ylabel="seconds")
    for axis in axes:
        axis.set_xticks(hosts, [str(h) for h in hosts], fontsize=7)
        axis.minorticks_off()
        axis.set_xlabel("hosts")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
