"""The files that ranks and RPC workers write, as they are read by commands.

It does not import torch, so that commands start quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import msgspec

from ..common.decoding import MalformedMessage, from_json
from ..common.formatting import counted, operation_name, printable
from ..config import read_file
from . import call_dumps
from .call_dumps import CallDump, DumpedError, Stack, Time

#: maximum size of a file
_MAX_BYTES = 256 << 20

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class DumpedOperation(msgspec.Struct):
    """The fields of an operation that are used; see :class:`shoal.recorder.Entry`, which needs torch."""

    kind: str
    number: _Int64
    key: int
    dtype: str
    count: _Int64
    root: _Int64
    peer: _Int64
    tag: _Int64
    state: str
    submitted: _Int64
    ended: _Int64

    def __str__(self) -> str:
        name = operation_name(self.kind, self.number, self.key)
        return f"{name} of {self.count} {self.dtype}" if self.dtype else name


class _Any(msgspec.Struct):
    schema: str


class Dump(msgspec.Struct):
    """The used fields of a file."""

    job: str
    group: str
    rank: int
    ranks: list[int]
    state: str
    time: Time
    now: _Int64
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
    name = printable(str(path))
    try:
        data = read_file(path, _MAX_BYTES)
        schema = from_json(data, _Any).schema
        if schema == call_dumps.SCHEMA:
            return from_json(data, CallDump)
        if schema != "shoal.dump/1":
            raise click.ClickException(f"{name}: this release of shoal cannot read {schema!r}")
        dump = from_json(data, Dump)
        if not 0 <= dump.rank < len(dump.ranks):
            raise MalformedMessage(f"rank {dump.rank} is not one of {counted(len(dump.ranks), 'rank')}")
        return dump
    except OSError as error:
        raise click.ClickException(f"{name}: {error.strerror or error}") from None
    except MalformedMessage as error:
        raise click.ClickException(f"{name} is not a dump of a group: {error}") from None
