"""Measure how long thousands of ranks take to meet in one store, and the cost for its server.

    python benchmarks/bootstrap.py                                  # 100 to 10,000 ranks, 3 minutes
    python benchmarks/bootstrap.py --kinds shoal etcd Redis         # with stores on other servers
    python benchmarks/bootstrap.py --ranks 100 1000 --rounds 3 --out /tmp --picture /tmp/bootstrap.png

Writes benchmarks/results/bootstrap.json and docs/bootstrap.png, and prints whether a meeting of 10,000 ranks
is within its bars: 10 s, and 3 s of CPU time and 150 MB of memory of the server, also if a tenth of the ranks
reconnect.

The server is a separate process. All ranks share another process, with one connection each, and run the
package's
code: they connect, prove that they know the secret, and meet, as in ``shoal.init`` before ranks connect to
each other (see ``bootstrap_ranks.py``). Hosts of 8 ranks are simulated. In rows "cut" a tenth of the ranks
lose their connection at a random moment and reconnect.

torch's TCPStore is measured in turns with shoal: 256 threads create the clients, each of which sets a
descriptor and increments a counter, then gets the last descriptor and that of its host. This is less than a
meeting: clients do not wait for one another, prove no secret and do not check for earlier jobs. TCPStore
resolves names, which takes 0.1 s per client if no name server answers. So its processes resolve names from
files only, in a mount namespace; without permission for that, at most 300 clients are used.

With ``--kinds etcd Redis`` the ranks meet in stores on these servers. A rank of etcd is a thread with its own
connections, at most 1,000; a rank of Redis has a connection for calls and another for waiting.

Times are until the last rank has finished; CPU time and memory are the server's. Requires ``greenlet`` and
``matplotlib``, and for etcd and Redis their programs, ``shoal[etcd]`` and ``shoal[redis]``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import bootstrap_ranks
import psutil
from rich.console import Console
from rich.table import Table

SECRET = b"of the benchmark"
#: number of descriptors that each side needs besides the ranks' connections
SPARE = 100
#: threads that create torch's clients, and maximum number of clients if a name server is used
THREADS, MOST = 256, 300
#: flags of ``unshare`` and ``mount``
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
#: maximum number of ranks that meet in etcd
MOST_IN_ETCD = 1000
PATIENCE = 120.0

HERE = Path(__file__).resolve().parent
#: bars for a meeting of this many ranks, for the first three of FIGURES
BAR_RANKS, BARS = 10_000, (10.0, 3.0, 150.0)

#: figures of one meeting
FIGURES = ("seconds", "server CPU, s", "server memory, MB", "connections cut")
Figures = dict[str, float]


def serve_shoal() -> None:
    from shoal.store import TCPStoreServer

    with TCPStoreServer("127.0.0.1", 0, SECRET) as server:
        print(server.port, flush=True)
        sys.stdin.read()


def serve_torch() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def serve_etcd() -> None:
    import bootstrap_etcd

    bootstrap_etcd.serve()


def etcd_meets(port: int, ranks: int, cut: float) -> tuple[float, int]:
    import bootstrap_etcd

    return bootstrap_etcd.meet(port, ranks, PATIENCE), 0


def serve_redis() -> None:
    import bootstrap_redis

    bootstrap_redis.serve()


def shoal_meets(port: int, ranks: int, cut: float) -> tuple[float, int]:
    from shoal.store import TCPStore

    def opened() -> TCPStore:
        return TCPStore("127.0.0.1", port, SECRET, timeout=PATIENCE)

    return seen(bootstrap_ranks.meet(opened, ranks, cut, PATIENCE))


def redis_meets(port: int, ranks: int, cut: float) -> tuple[float, int]:
    import bootstrap_redis

    return seen(bootstrap_redis.meet(port, ranks, PATIENCE))


def seen(outcome: bootstrap_ranks.Outcome) -> tuple[float, int]:
    if outcome.failures:
        raise SystemExit(f"{len(outcome.failures)} ranks failed, the first: {outcome.failures[0]}")
    return outcome.seconds, outcome.cut


def torch_meets(port: int, ranks: int, cut: float) -> tuple[float, int]:
    from torch.distributed import TCPStore

    def come(rank: int) -> TCPStore:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE))
        store.set(f"rank/{rank}", "x" * 150)
        if store.add("came", 1) == ranks:
            for host in range(0, ranks, bootstrap_ranks.PER_HOST):
                store.set(f"host/{host}", "x" * 100)
            store.set("met", "x" * 200)
        return store

    def look(store: TCPStore, rank: int) -> None:
        store.get("met")
        store.get(f"host/{rank - rank % bootstrap_ranks.PER_HOST}")

    with ThreadPoolExecutor(THREADS) as pool:
        begin = time.monotonic()
        stores = list(pool.map(come, range(ranks)))
        list(pool.map(look, stores, range(ranks)))
        return time.monotonic() - begin, 0


TORCH = "torch TCPStore"
#: kind -> (server, meeting, share of ranks whose connection is cut)
KINDS: dict[str, tuple[Callable[[], None], Callable[[int, int, float], tuple[float, int]], float]] = {
    "shoal": (serve_shoal, shoal_meets, 0.0),
    "shoal, a tenth cut": (serve_shoal, shoal_meets, 0.1),
    TORCH: (serve_torch, torch_meets, 0.0),
    "etcd": (serve_etcd, etcd_meets, 0.0),
    "Redis": (serve_redis, redis_meets, 0.0),
}


@contextlib.contextmanager
def server(kind: str) -> Iterator[tuple[psutil.Process, int]]:
    """Start a process that serves a store; yield it and its port. It exits when its stdin is closed."""
    command = [sys.executable, __file__, "--serve", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield psutil.Process(process.pid), int(process.stdout.readline())
        process.kill()


def measure(kind: str, ranks: int) -> Figures:
    _, meet, cut = KINDS[kind]
    if kind == TORCH:
        look_names_up_in_files()
    with server(kind) as (process, port):
        before = process.cpu_times()
        seconds, broken = meet(port, ranks, cut)
        after = process.cpu_times()
        spent = after.user + after.system - before.user - before.system
        memory = process.memory_info().rss / 1e6
        return dict(zip(FIGURES, (seconds, spent, memory, broken), strict=True))


def look_names_up_in_files() -> bool:
    """Make this process and its children resolve names from files only; return False if not permitted."""
    libc = ctypes.CDLL(None)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("hosts: files\n")
        file.flush()
        source = file.name.encode()
        return (
            libc.unshare(CLONE_NEWNS) == 0
            and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
            and libc.mount(source, b"/etc/nsswitch.conf", None, MS_BIND, None) == 0
        )


def may_look_names_up_in_files() -> bool:
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not look_names_up_in_files()))
    child.start()
    child.join()
    return child.exitcode == 0


def measured(kind: str, ranks: int) -> Figures:
    """Measure in a new process, so that earlier meetings do not affect later ones."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(measure(kind, ranks)))
    child.start()
    theirs.close()
    try:
        figures: Figures = ours.recv()
    except EOFError:
        raise SystemExit(f"{kind} with {ranks} ranks failed") from None
    finally:
        child.join()
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 300, 1000, 3000, 10000])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of turns; medians are shown")
    parser.add_argument(
        "--kinds", nargs="+", default=[*KINDS][:3], choices=list(KINDS), help="default: without servers"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of bootstrap.json")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "bootstrap.png")
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        KINDS[options.serve][0]()
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(options.ranks) * (2 if "Redis" in options.kinds else 1) + SPARE
    if needed > hard:
        parser.error(
            f"{max(options.ranks)} ranks need {needed} descriptors, and the limit is {hard} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    limits = {"etcd": MOST_IN_ETCD}
    if not may_look_names_up_in_files():
        limits[TORCH] = MOST
    record: dict[str, dict[str, Figures]] = {kind: {} for kind in options.kinds}
    for ranks in options.ranks:
        kinds = [kind for kind in options.kinds if ranks <= limits.get(kind, ranks)]
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BOOTSTRAP_FOLDER"] = folder
            rounds = [{kind: measured(kind, ranks) for kind in kinds} for _ in range(options.rounds)]
        for kind in kinds:
            record[kind][str(ranks)] = {
                name: statistics.median(each[kind][name] for each in rounds) for name in FIGURES
            }
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "ranks of a host": bootstrap_ranks.PER_HOST,
        "ranks that start in a second": bootstrap_ranks.PER_SECOND,
    }
    bars = held_against_bars(record)
    text = json.dumps({"about": about, "results": record, "bars": bars}, indent=1)
    (options.out / "bootstrap.json").write_text(text + "\n")
    show(record, options.ranks)
    for kind, each in bars.items():
        for name, (figure, bar) in each.items():
            said = "met" if figure <= bar else "MISSED"
            print(f"{kind}, {BAR_RANKS:,} ranks: {name} {figure:.3g}, the bar is {bar:g}: {said}")
    draw(record, options.picture)


def held_against_bars(record: dict[str, dict[str, Figures]]) -> dict[str, dict[str, tuple[float, float]]]:
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for kind, results in record.items():
        if KINDS[kind][0] is serve_shoal and str(BAR_RANKS) in results:
            figures = results[str(BAR_RANKS)]
            found[kind] = {name: (figures[name], bar) for name, bar in zip(FIGURES[:3], BARS, strict=True)}
    return found


def show(record: dict[str, dict[str, Figures]], sizes: Sequence[int]) -> None:
    table = Table("", "", *(f"{size:,}" for size in sizes))
    for kind, results in record.items():
        for name in FIGURES:
            found = (results.get(str(size)) for size in sizes)
            table.add_row(kind, name, *("" if each is None else f"{each[name]:.3g}" for each in found))
    Console().print(table)


def draw(record: dict[str, dict[str, Figures]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for axes, name in zip(panels, FIGURES[:3], strict=True):
        for kind, results in record.items():
            axes.plot(
                [int(size) for size in results], [each[name] for each in results.values()], "o-", label=kind
            )
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=name)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
