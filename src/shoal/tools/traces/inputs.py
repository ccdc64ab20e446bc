"""The files that ``shoal trace merge`` reads, with all used fields checked."""

from __future__ import annotations

import gzip
import io
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import click
import msgspec

from ...common.chrome_trace import write_trace
from ...common.decoding import MalformedMessage, from_json
from ...tracing.rank_trace import RankTrace
from ...tracing.spool import SPOOL_SUFFIX, TRACE_SUFFIX, TracedRank, checked, read_spool

#: endings of the files of torch.profiler, as ``tensorboard_trace_handler`` names them
TORCH_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
#: maximum size of a file, decompressed
_MAX_BYTES = 1 << 30
#: maximum number of commas in it, as each value of its JSON takes up to 100 bytes of memory
_MAX_COMMAS = 30_000_000

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Text = Annotated[str, msgspec.Meta(max_length=10_000)]
#: microseconds, up to 30 years
_Microseconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class RankEvent(msgspec.Struct, omit_defaults=True):
    """An event of the trace of a rank."""

    name: _Text
    ph: Literal["M", "X", "b", "e", "i"]
    pid: int
    tid: _Number
    cat: _Text = ""
    ts: _Microseconds | msgspec.UnsetType = msgspec.UNSET
    dur: _Duration | msgspec.UnsetType = msgspec.UNSET
    id: _Text = ""
    s: _Text = ""
    args: dict[str, str | int | float | bool | None] = {}


class _Tracks(msgspec.Struct):
    """The threads of a group, one for each lane."""

    tid: _Number
    lanes: Annotated[int, msgspec.Meta(ge=1, lt=2**20)]
    ident: _Text


class _RankData(msgspec.Struct):
    rank: TracedRank
    groups: list[_Tracks]
    dropped: Annotated[int, msgspec.Meta(ge=0)]
    truncated: bool


class _RankContent(msgspec.Struct):
    traceEvents: list[RankEvent]
    otherData: _RankData


class Lane(NamedTuple):
    """A lane of a group."""

    ident: str
    number: int


class RankInput:
    """The trace of one rank."""

    def __init__(self, path: Path, content: _RankContent) -> None:
        data = content.otherData
        self.path = path
        self.rank = checked(data.rank)
        self.events = content.traceEvents
        self.dropped, self.truncated = data.dropped, data.truncated
        self._groups = sorted(data.groups, key=lambda group: group.tid)
        self._tids = [group.tid for group in self._groups]
        for event in self.events:
            if event.ph == "M":
                continue
            self.lane(event.tid)
            if event.ts is msgspec.UNSET or (event.ph == "X" and event.dur is msgspec.UNSET):
                raise MalformedMessage(f"the event {event.name!r} has no time")

    def lane(self, tid: int) -> Lane:
        """The lane of a track."""
        index = bisect_right(self._tids, tid) - 1
        if index < 0 or tid >= self._tids[index] + self._groups[index].lanes:
            raise MalformedMessage(f"an event has the tid {tid}, which is not that of a group")
        group = self._groups[index]
        return Lane(group.ident, tid - group.tid)

    def time(self, microseconds: float) -> int:
        """Convert a time of an event to nanoseconds of the rank's clock."""
        return self.rank.begun + round(microseconds * 1e3)


class _DistributedInfo(msgspec.Struct):
    rank: int


class _TorchContent(msgspec.Struct):
    traceEvents: list[dict[str, Any]]
    baseTimeNanoseconds: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    distributedInfo: _DistributedInfo | None = None


class TorchInput:
    """A trace of torch.profiler.

    Attributes:
        pids: ids of the processes that it shows.
        rank: in torch.distributed; None if that was not initialised.
    """

    def __init__(self, path: Path, content: _TorchContent) -> None:
        self.path = path
        self.events = content.traceEvents
        self.base = content.baseTimeNanoseconds
        self.rank = None if content.distributedInfo is None else content.distributedInfo.rank
        for event in self.events:
            time = event.get("ts", 0.0)
            if (
                not isinstance(event.get("ph"), str)
                or not isinstance(event.get("pid", 0), int | str)
                or not isinstance(time, int | float)
                or not abs(time) < 1e18
                or not isinstance(event.get("args", {}), dict)
            ):
                raise MalformedMessage(f"the event {str(event)[:100]} is not valid")
        self.pids = {event["pid"] for event in self.events if isinstance(event.get("pid"), int)}

    def time(self, microseconds: float) -> int:
        """Convert a time of an event to nanoseconds of CLOCK_REALTIME."""
        return self.base + round(microseconds * 1e3)


def find(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the traces of ranks, and of torch.profiler, in a directory."""
    try:
        found = list(directory.iterdir())
        # A spool may become a trace meanwhile.
        files = {path for each in found for path in (each, _trace_of(each)) if path.is_file()}
    except OSError as error:
        raise click.ClickException(f"{directory}: {error.strerror or error}") from None
    ranks = [
        path
        for path in sorted(files)
        if path.name.startswith("shoal-")
        and (
            path.name.endswith(TRACE_SUFFIX)
            or (path.name.endswith(SPOOL_SUFFIX) and _trace_of(path) not in files)
        )
    ]
    if not ranks:
        raise click.ClickException(
            f"{directory}: no file shoal-*{TRACE_SUFFIX} found; run the job with SHOAL_TRACE={directory}"
        )
    return ranks, [path for path in sorted(files) if path.name.endswith(TORCH_SUFFIXES)]


def _trace_of(path: Path) -> Path:
    """The trace that a spool becomes; any other path is returned as it is."""
    stem = path.name.removesuffix(SPOOL_SUFFIX)
    return path if stem == path.name else path.with_name(stem + TRACE_SUFFIX)


def read_rank(path: Path) -> RankInput:
    """Read the trace of a rank, or the spool of a rank that was killed or is running."""
    try:
        if path.name.endswith(SPOOL_SUFFIX):
            try:
                contents = read_spool(path)
            except FileNotFoundError:  # the rank has ended since
                return read_rank(_trace_of(path))
            made = RankTrace(contents)
            buffer = io.BytesIO()
            write_trace(buffer, made.events(), made.other())
            return RankInput(path, from_json(buffer.getbuffer(), _RankContent))
        return RankInput(path, from_json(_content(path), _RankContent))
    except (OSError, MalformedMessage) as error:
        raise _unreadable(path, "a trace of shoal", error) from None


def read_torch(path: Path) -> TorchInput:
    """Read a trace of torch.profiler."""
    try:
        return TorchInput(path, from_json(_content(path), _TorchContent))
    except (OSError, EOFError, zlib.error, MalformedMessage) as error:
        raise _unreadable(path, "a trace of torch.profiler", error) from None


def _content(path: Path) -> bytes:
    with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as file:
        data: bytes = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise MalformedMessage(f"it has more than {_MAX_BYTES >> 30} GiB")
    if data.count(b",") > _MAX_COMMAS:
        raise MalformedMessage(f"it has more than {_MAX_COMMAS:,} values")
    return data


def _unreadable(path: Path, what: str, error: Exception) -> click.ClickException:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return click.ClickException(
        f"{path} is not {what}, or is damaged: {reason}; remove it to merge the other files"
    )


def number_of(args: Mapping[str, object], name: str) -> int:
    """Return a whole number among the arguments of an event."""
    value = args.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedMessage(f"an event has {name}={value!r}")
    return value
