"""One rank of a contender: receives orders on a socket, executes them, and answers.

Orders and answers are lines of JSON. While another contender is measured, the rank blocks in ``readline`` and
uses no CPU time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import socket
from contextlib import suppress
from typing import Any

from ..case import Case, Size
from . import timing
from .data import WrongResult
from .engine import ContenderRank, Unsupported
from .timing import TimedCase

#: name of an engine -> module and class
ENGINES = {
    "floor": ("floor", "HardwareLimit"),
    "gloo": ("gloo", "Gloo"),
    "mpi": ("mpi", "Mpi"),
    "shoal": ("shoal", "Shoal"),
    "torch": ("gloo", "InTorch"),
}


class Rank:
    """Executes orders; each method is an order and returns its answer."""

    def __init__(self, engine: ContenderRank) -> None:
        self._engine = engine
        self._jobs: dict[str, TimedCase] = {}

    def prepare(self, variant: str, operation: str, dtype: str, nbytes: int, offset: int) -> dict[str, Any]:
        """Create the buffers of a case and check its result."""
        job = TimedCase(self._engine, Case(operation, dtype, Size(nbytes, offset)), variant)
        self._jobs[variant] = job
        return {"error": job.error}

    def sample(self, variant: str, repeat: int) -> dict[str, Any]:
        seconds, every = self._jobs[variant].sample(repeat)
        return {"seconds": seconds, "every": every}

    def release(self) -> dict[str, Any]:
        self._jobs.clear()
        gc.collect()
        self._engine.release()
        return {}

    def micro(self, name: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(timing, name)(self._engine, **arguments)
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--control", required=True, help="path of the coordinator's socket")
    parser.add_argument("--hosts", type=int, default=1)
    arguments = parser.parse_args()
    where, name = ENGINES[arguments.engine]
    module = importlib.import_module(f".{where}", __package__)
    engine: ContenderRank = getattr(module, name)(arguments.control, arguments.hosts)
    rank = Rank(engine)
    # The coordinator may exit at any time; the engine is closed nevertheless.
    with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as control:
        control.connect(arguments.control)
        with control.makefile("rw") as lines:

            def answer(**values: Any) -> None:
                lines.write(json.dumps(values) + "\n")
                lines.flush()

            answer(version=engine.version, rank=engine.rank)
            while order := json.loads(lines.readline() or "{}"):
                try:
                    answer(**getattr(rank, order.pop("do"))(**order))
                except (Unsupported, WrongResult) as error:
                    answer(absent=str(error), wrong=isinstance(error, WrongResult))
                except Exception as error:
                    text = str(error).strip().split("\n")[0]
                    answer(absent=f"{type(error).__name__}: {text}", wrong=False)
    del rank
    engine.close()


if __name__ == "__main__":
    main()
