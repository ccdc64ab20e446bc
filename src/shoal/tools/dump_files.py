"""The files that ranks and RPC workers write, as they are read by commands.

It does not import torch, so that commands start quickly.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ..common.decoding import MalformedMessage, from_json
from ..common.formatting import counted, operation_name
from . import call_dumps
from .call_dumps import CallDump, DumpedError, Stack


class DumpedOperation(msgspec.Struct):
    """The fields of an operation that are used; see :class:`shoal.recorder.Entry`, which needs torch."""

    kind: str
    number: int
    key: int
    dtype: str
    count: int
    root: int
    peer: int
    tag: int
    state: str
    submitted: int
    ended: int

    def __str__(self) -> str:
        name = operation_name(self.kind, self.number, self.key)
        return f"{name} of {self.count} {self.dtype}" if self.dtype else name


class _Any(msgspec.Struct):
    schema: str


class Dump(msgspec.Struct):
    """The used fields of a file."""

    schema: str
    job: str
    group: str
    rank: int
    ranks: list[int]
    state: str
    time: float
    now: int
    error: DumpedError | None
    entries: list[DumpedOperation]
    stacks: list[Stack]

    @property
    def highest(self) -> int:
        """The number of the latest called operation; -1 if there is none."""
        return max((entry.number for entry in self.entries), default=-1)

    @property
    def completed(self) -> DumpedOperation | None:
        done = (entry for entry in self.entries if entry.state == "completed" and entry.number >= 0)
        return max(done, key=lambda entry: entry.number, default=None)

    @property
    def unfinished(self) -> DumpedOperation | None:
        """The first operation that is pending or failed."""
        return next((entry for entry in self.entries if entry.state in ("submitted", "failed")), None)


#: the dumps by job, name and ranks of the group, and by rank in the group
GroupDumps = dict[tuple[str, str, tuple[int, ...]], dict[int, Dump]]


def read(path: Path) -> Dump | CallDump:
    """Read a file; raises `click.ClickException` if it is not a dump."""
    try:
        data = path.read_bytes()
        schema = from_json(data, _Any).schema
        if schema == call_dumps.SCHEMA:
            return from_json(data, CallDump)
        if schema != "shoal.dump/1":
            raise click.ClickException(f"{path}: this release of shoal cannot read {schema!r}")
        dump = from_json(data, Dump)
        if not 0 <= dump.rank < len(dump.ranks):
            raise MalformedMessage(f"rank {dump.rank} is not one of {counted(len(dump.ranks), 'rank')}")
        return dump
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror or error}") from None
    except MalformedMessage as error:
        raise click.ClickException(f"{path} is not a dump of a group: {error}") from None
