"""What clients see of a durable store has an order, though its server is killed at every step."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from shoal.errors import WireError
from shoal.store import TCPStore
from shoal.testing import linearize
from tests.support.folders import folder_in_memory
from tests.support.ports import free_port

from .mortal_server import SECRET

ROOT = Path(__file__).parents[2]
MANY = 3 if os.environ.get("STRESS") == "short" else 40
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(1, MANY))]


#: deaths of the server that a test waits for, however quick the machine is
DEATHS = 3


@contextmanager
def mortal(seed: int, fault: str = "none") -> Iterator[tuple[TCPStore, Callable[[], int]]]:
    """A server that dies and comes again: a store, and a function that counts the deaths."""
    port = free_port()
    with ExitStack() as stack:
        folder = stack.enter_context(folder_in_memory())
        arguments = [str(folder / "log"), str(port), str(seed), fault]
        died = folder / "died"
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.store.mortal_server", *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=stack.enter_context(died.open("wb")),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.kill)

        try:
            yield stack.enter_context(_connected(port)), lambda: died.read_bytes().count(b"\n")
        finally:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err


def _connected(port: int) -> TCPStore:
    while True:  # the first connection of a store may not be lost
        with suppress(WireError):
            return TCPStore("127.0.0.1", port, SECRET, timeout=60)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_durable_store_is_linearizable_though_its_server_is_killed(seed: int) -> None:
    with mortal(seed) as (store, deaths):
        for part in itertools.count():
            linearize.play(store, seed=100 * seed + part, operations=60 if seed else 30)
            if deaths() >= DEATHS:
                break


@pytest.mark.parametrize("fault", ["late", "forget"])
def test_a_server_without_syncs_or_without_its_replies_is_found_out(fault: str) -> None:
    def play(store: TCPStore, deaths: Callable[[], int]) -> None:
        for seed in itertools.count():
            linearize.play(store, seed=seed)
            assert deaths() < 1000, "not found out"

    with mortal(0, fault) as played, pytest.raises(AssertionError, match="no order of its"):
        play(*played)
