"""A table of the dumps of RPC workers: the calls that each one waits for and serves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated

import msgspec
from rich import box
from rich.table import Table

from ..common.formatting import printable
from .findings import Finding, fail, ok

#: frames of the standard library, installed packages and shoal, which hide the program's position
_INSTALLED = re.compile(
    rf"/lib/python3|/(site|dist)-packages/|/src/shoal/|{re.escape(str(Path(__file__).parents[1]))}/"
)


class Stack(msgspec.Struct):
    """The stack of one thread, innermost frame last."""

    thread: str
    frames: list[str]


def place_of(stacks: Sequence[Stack]) -> str:
    """The program's innermost frame in the main thread; if it has none there, a library's."""
    frames = next((stack.frames for stack in stacks if stack.thread == "MainThread"), [])
    own = [frame for frame in frames if not _INSTALLED.search(frame)]
    return (own or frames or [""])[-1]


#: version of the format; duplicated from :mod:`shoal.rpc.recorder`, which needs torch
SCHEMA = "shoal.calls/1"
#: number of a node's commands that are shown
_SHOWN = 5

#: seconds since 1970
Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class DumpedError(msgspec.Struct):
    type: str
    message: str


class _Pending(msgspec.Struct):
    call: str
    callee: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.call} at {self.callee!r}"


class _DumpedCall(msgspec.Struct):
    call: str
    caller: str
    seconds: float | None

    def __str__(self) -> str:
        return f"{self.call or 'a call'} of {self.caller!r}"


class _NodeState(msgspec.Struct):
    commands: list[str]
    runs: str


class CallDump(msgspec.Struct):
    """The displayed fields of a file."""

    job: str
    worker: str
    state: str
    time: Time
    error: DumpedError | None
    pending: list[_Pending]
    served: list[_DumpedCall]
    stacks: list[Stack]
    nodes: list[_NodeState] = []


def table(workers: Mapping[str, CallDump]) -> Table:
    """A table with each worker's oldest pending call and the oldest call that it serves."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("worker", "agent", "waits for", "for s", "serves", "for s", "main thread"):
        drawn.add_column(heading, justify="right" if heading == "for s" else "left", overflow="fold")
    for name, dump in sorted(workers.items()):
        cells = name, dump.state, *_oldest(dump.pending), *_oldest(dump.served), place_of(dump.stacks)
        drawn.add_row(*map(printable, cells))
    return drawn


def _oldest(calls: list[_Pending] | list[_DumpedCall]) -> tuple[str, str]:
    """Describe the first call and the number of others, and its age."""
    if not calls:
        return "", ""
    seconds, more = calls[0].seconds, len(calls) - 1
    return (
        f"{calls[0]}" + f", and {more} more" * (more > 0),
        "not begun" if seconds is None else f"{seconds:.1f}",
    )


def findings(workers: Mapping[str, CallDump]) -> list[Finding]:
    """Describe problems that only show when all dumps are combined."""
    found = []
    if failed := [dump for dump in workers.values() if dump.error is not None]:
        first = min(failed, key=lambda dump: dump.time)
        assert first.error is not None
        found.append(fail(
            f"worker {first.worker!r} wrote first: {first.error.type}: {first.error.message}",
            f"docs/errors.md explains {first.error.type}; look at the worker that it names first",
        ))  # fmt: skip
    awaited = {each.callee for dump in workers.values() for each in dump.pending}
    found += [
        fail(
            f"no file of worker {name!r}, which others wait for",
            "look at the output and exit code of this worker; if its process runs, `py-spy dump --pid PID`",
        )
        for name in sorted(awaited - {*workers, ""})
    ]
    for name, dump in sorted(workers.items()):
        for node in dump.nodes:
            runs = f"runs {node.runs}" if node.runs else "runs nothing"
            before = f", after {', '.join(node.commands[-_SHOWN:])}" if node.commands else ""
            found.append(ok(f"worker {name!r}, a node, {runs}{before}"))
    if circle := _wait_cycle(workers):
        found.append(fail(
            "they wait for one another: " + " -> ".join(map(repr, circle)),
            "do not wait in a called function for a call to a worker that may wait for this one: return the "
            "future instead, or use an asynchronous function",
        ))  # fmt: skip
    return found


def _wait_cycle(workers: Mapping[str, CallDump]) -> list[str]:
    """A cycle of workers that wait for one another, with the first one at both ends; [] if there is none."""
    waits = {name: [each.callee for each in dump.pending] for name, dump in sorted(workers.items())}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]  # each is awaited by the next one
        return cycle[::-1]
    return []
