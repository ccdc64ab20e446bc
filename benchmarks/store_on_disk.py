"""Measure the cost of a change in a store on disk and in memory, in turns.

    python -m benchmarks.store_on_disk [FOLDER]

One client sets a key repeatedly; then several clients do so concurrently, each with its own connection. The
time of the disk alone is shown too: a write of the same size and its ``fdatasync``. Medians of the rounds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.store import DurableStoreServer, TCPStore, TCPStoreServer

SECRET = b"secret"
CLIENTS, ALONE, TOGETHER, ROUNDS = 100, 200, 20, 5


def alone(store: TCPStore) -> float:
    start = time.perf_counter()
    for number in range(ALONE):
        store.set("key", b"%064d" % number)
    return (time.perf_counter() - start) / ALONE


def together(stores: list[TCPStore]) -> float:
    """Return the total time of concurrent clients divided by the number of sets."""
    ready = threading.Barrier(len(stores) + 1)

    def work(number: int, store: TCPStore) -> None:
        ready.wait()
        for step in range(TOGETHER):
            store.set(f"key/{number}", b"%064d" % step)

    with ThreadPoolExecutor(len(stores)) as pool:
        calls = [pool.submit(work, number, store) for number, store in enumerate(stores)]
        ready.wait()
        start = time.perf_counter()
        for call in calls:
            call.result()
        return (time.perf_counter() - start) / (TOGETHER * len(stores))


def disk(folder: Path) -> float:
    """Return the seconds of one append to a file and its sync."""
    with (folder / "alone").open("wb", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(ALONE):
            file.write(bytes(128))
            os.fdatasync(file.fileno())
        return (time.perf_counter() - start) / ALONE


def serve(server: TCPStoreServer) -> tuple[TCPStoreServer, list[TCPStore]]:
    server.start()
    return server, [TCPStore("127.0.0.1", server.port, SECRET) for _ in range(CLIENTS)]


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        folder = Path(name)
        memory, of_memory = serve(TCPStoreServer(secret=SECRET))
        durable, of_durable = serve(DurableStoreServer(folder / "log", secret=SECRET))
        measures: dict[str, Callable[[], float]] = {
            "the disk alone": lambda: disk(folder),
            "one client, memory": lambda: alone(of_memory[0]),
            "one client, on disk": lambda: alone(of_durable[0]),
            f"{CLIENTS} clients, memory": lambda: together(of_memory),
            f"{CLIENTS} clients, on disk": lambda: together(of_durable),
        }
        times: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(ROUNDS):
            for what, measure in measures.items():
                times[what].append(measure())
        for what, seconds in times.items():
            print(f"{what:24} {statistics.median(seconds) * 1e6:9.0f} us a set")
        for store in of_memory + of_durable:
            store.close()
        memory.close()
        durable.close()


if __name__ == "__main__":
    main()
