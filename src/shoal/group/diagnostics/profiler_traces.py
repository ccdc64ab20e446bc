"""Traces of torch's profiler with the operations of groups, for Perfetto, TensorBoard and trace analysers.

Kineto records what the threads of the program do, but not that a collective is in progress meanwhile.  The
handler adds the operations of the flight recorders, from ``submitted`` to ``ended`` of :class:`Entry`.

Analysers such as HolisticTraceAnalysis compare kernels on the streams of a GPU, each with the ``correlation``
of the event that launched it.  A trace of CPUs has none.  So each operation is a kernel on a stream for
communication, and each operator of the CPU that is not part of another one is a kernel on another stream,
without its submissions and waits.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...common.atomic_file import AtomicFile
from ...errors import UsageError
from ...world import open_groups
from ..profiling import PREFIX, ends_of_message, metadata

if TYPE_CHECKING:
    from ..process_group import ProcessGroup

logger = logging.getLogger(__name__)

#: an event of a trace, as in its JSON; times are in microseconds
Event = dict[str, Any]

#: first id of the added lanes; larger than the thread ids of Linux, which are below 2**22
_FIRST_LANE = 2**24
_COMPUTATION_STREAM = 1
#: analysers recognise a kernel that communicates by this beginning
_KERNEL = "ncclKernel_"
_STEP = "ProfilerStep#"
#: beginnings of the names of operators that communicate or wait for communication
_COMMUNICATION = (PREFIX, "c10d::", "gloo:", "nccl:")
#: tolerance of the conversion between the clocks of recorder and profiler
_CLOCK_ERROR_US = 20.0
#: messages of a batch whose ranges are found
_MAX_NESTED = 64


def profiler_handler(
    directory: str | os.PathLike[str], *, worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Any], None]:
    """Return an ``on_trace_ready`` for ``torch.profiler.profile`` that adds the operations of shoal's groups.

        with torch.profiler.profile(on_trace_ready=shoal.profiler_handler("traces")):
            train()

    Each rank writes a file for each cycle of its profiler, as with
    ``torch.profiler.tensorboard_trace_handler``.  Groups that were closed before are not in it.
    ``docs/profiler.md`` describes what is added.

    Args:
        directory: directory of the files, which is created if needed.
        worker_name: first part of the file names, different on each rank; None: host name and process id.
        use_gzip: whether to compress the files.

    Raises:
        UsageError: ``worker_name`` is not a string, is empty or has a slash; or it or the directory has a
            character that no file name can have.
        OSError: in the handler, if the file cannot be written.
    """
    is_name = isinstance(worker_name, str) and worker_name != "" and "/" not in worker_name
    if worker_name is not None and not is_name:
        raise UsageError(
            f"profiler_handler: worker_name={worker_name!r}; expected the first part of a file name"
        )
    folder = Path(directory)
    if "\0" in f"{folder}{worker_name}":
        raise UsageError("profiler_handler: a file name cannot have a zero character")

    def handle(profiler: Any) -> None:
        worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"
        name = f"{worker}.{time.time_ns()}.pt.trace.json"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="shoal-trace-") as scratch:
            exported = Path(scratch) / name
            profiler.export_chrome_trace(str(exported))
            data = exported.read_bytes()
        try:
            trace = json.loads(data.decode(errors="replace"), strict=False)
        except json.JSONDecodeError as error:
            logger.warning("%s: no operations of shoal are added: Kineto's JSON is invalid, %s", name, error)
        else:
            data = json.dumps(with_operations(trace, open_groups())).encode()
        with AtomicFile(folder / (name + ".gz" if use_gzip else name)) as draft:
            draft.file.write(gzip.compress(data) if use_gzip else data)
            draft.replace()

    return handle


def with_operations(trace: dict[str, Any], groups: Sequence[ProcessGroup]) -> dict[str, Any]:
    """Return a trace of Kineto with the operations of ``groups``."""
    events: list[Event] = trace["traceEvents"]
    slices = [event for event in events if event.get("ph") == "X" and "dur" in event]
    begin = min((event["ts"] for event in slices), default=0.0)
    end = max((event["ts"] + event["dur"] for event in slices), default=0.0)
    offset = (_real_time_offset() - int(trace.get("baseTimeNanoseconds", 0))) / 1e3
    found = [operation for group in groups for operation in _operations(group, offset, begin, end)]
    has_gpu = any(event.get("cat") == "kernel" for event in slices)
    lanes = _Lanes(slices, has_gpu)
    if not has_gpu:
        for operator, start, stop in _computation(slices):
            lanes.add_computation(operator, start, stop)
    for operation in sorted(found, key=lambda operation: operation.submitted):
        lanes.add_operation(operation)
    # The first item, because HolisticTraceAnalysis searches the text for the first "rank".
    distributed = trace.pop("distributedInfo", None) or _distributed_information(groups)
    head = {"distributedInfo": distributed} if distributed else {}
    return {**head, **trace, "traceEvents": events + lanes.events}


def _real_time_offset() -> int:
    """Return the difference between real and monotonic time in nanoseconds."""
    samples = []
    for _ in range(5):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        samples.append((after - before, real - (before + after) // 2))
    return min(samples)[1]


def _distributed_information(groups: Sequence[ProcessGroup]) -> dict[str, Any]:
    """Return what Kineto writes for torch.distributed."""
    if not groups:
        return {}
    membership = groups[0]._world.membership
    return {"backend": "shoal", "rank": membership.rank, "world_size": membership.size}


# -- communication -----------------------------------------------------------------------------


class _Operation(NamedTuple):
    kind: str
    submitted: float  #: when the submission was recorded, which is within its range
    end: float
    metadata: dict[str, str | int]


def _operations(group: ProcessGroup, offset: float, begin: float, end: float) -> Iterator[_Operation]:
    """Yield the operations of a group between two times of the trace.

    Args:
        offset: microseconds from the recorder's clock to that of the trace.
    """
    recorder = group.recorder
    entries = [] if recorder is None else recorder.entries()
    # The oldest entry shows whether the recorder has dropped some of this time.
    is_short = recorder is None or (
        len(entries) == recorder.size and entries[0].submitted / 1e3 + offset > begin
    )
    if is_short:
        logger.warning(
            "rank %d of group %r: the trace has only the last %d operations; raise SHOAL_RECORDER_SIZE",
            group.rank, group.name, len(entries),
        )  # fmt: skip
    for entry in entries:
        submitted = entry.submitted / 1e3 + offset
        if entry.ended:
            ended = entry.ended / 1e3 + offset
        elif entry.state == "submitted":
            ended = end
        else:
            continue  # nobody has seen its end
        if submitted < end and ended > begin:
            dtype = getattr(torch, entry.dtype) if entry.dtype else None
            has_input = entry.kind != "recv" and (
                entry.kind not in ("broadcast", "scatter") or entry.root == group.rank
            )
            count = entry.count if has_input else 0
            described = metadata(group._spec, entry.kind, dtype, count, entry.number)
            if not has_input or entry.kind == "all_reduce":
                described["Out msg nelems"] = entry.count
            described.update(ends_of_message(group._spec, entry.kind, entry.peer))
            yield _Operation(entry.kind, submitted, min(ended, end), described)


# -- computation -------------------------------------------------------------------------------


def _computation(slices: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Yield begin and end of the outermost operators of each thread, without communication in them."""
    threads: dict[Any, list[Event]] = {}
    for event in slices:
        if event.get("cat") == "cpu_op":
            threads.setdefault(event["tid"], []).append(event)
    for own in threads.values():
        own.sort(key=lambda event: (event["ts"], -event["dur"]))
        outer, begin, end = None, 0.0, float("-inf")  # the outermost operator, and what is left of it
        for event in own:
            start, stop = event["ts"], event["ts"] + event["dur"]
            communicates = event["name"].startswith(_COMMUNICATION)
            if start >= end:
                if outer is not None and begin < end:
                    yield outer, begin, end
                outer, begin, end = (None if communicates else event), start, stop
            elif communicates and outer is not None:
                if begin < start:
                    yield outer, begin, start
                begin = max(begin, stop)
        if outer is not None and begin < end:
            yield outer, begin, end


# -- lanes -------------------------------------------------------------------------------------


class _Lanes:
    """The added events.

    Args:
        slices: the events of the trace, which get the ``correlation`` and metadata of what they launch.
        has_gpu: whether the trace has kernels, to which no others must be added.
    """

    def __init__(self, slices: Sequence[Event], has_gpu: bool) -> None:
        self.events: list[Event] = []
        self._has_gpu = has_gpu
        self._pid = os.getpid()
        self._correlations = count(1)
        self._begin = min((event["ts"] for event in slices), default=0.0)
        #: the end of the last operation in each lane of communication
        self._ends: list[float] = []
        self._steps = _ByTime([event for event in slices if event["name"].startswith(_STEP)])
        ranges: dict[str, list[Event]] = {}
        for event in slices:
            if event["name"].startswith(PREFIX):
                ranges.setdefault(event["name"].removeprefix(PREFIX), []).append(event)
        self._ranges = {kind: _ByTime(own) for kind, own in ranges.items()}

    def add_computation(self, operator: Event, begin: float, end: float) -> None:
        if not self.events:
            self._name_lane(_COMPUTATION_STREAM, "shoal: computation")
        self._add(operator["name"], _COMPUTATION_STREAM, begin, end, {}, operator)

    def add_operation(self, operation: _Operation) -> None:
        ranges = self._ranges.get(operation.kind)
        launch = None if ranges is None else ranges.at(operation.submitted, take=True)
        if launch is not None:
            launch["args"] = {**operation.metadata, **launch.get("args", {})}
            begin = min(launch["ts"], operation.submitted)  # the submission may move data
        else:  # submitted in a thread that the profiler does not record, or before it began
            begin = max(self._begin, operation.submitted)
            launch = self._steps.at(begin)
        # Slices of one lane must not overlap.
        lane = next((lane for lane, end in enumerate(self._ends) if end <= begin), len(self._ends))
        stream = _COMPUTATION_STREAM + 1 + lane
        if lane == len(self._ends):
            self._ends.append(0.0)
            self._name_lane(stream, f"shoal: communication {lane}")
        self._ends[lane] = operation.end
        self._add(_KERNEL + operation.kind, stream, begin, operation.end, operation.metadata, launch)

    def _add(
        self,
        name: str,
        stream: int,
        begin: float,
        end: float,
        described: dict[str, str | int],
        launch: Event | None,
    ) -> None:
        place = {"pid": self._pid, "tid": _FIRST_LANE + stream}
        added: Event = {"ph": "X", "name": name, **place, "ts": begin, "dur": end - begin, "args": described}
        self.events.append(added)
        if self._has_gpu:
            added["cat"] = "shoal"
            return
        added["cat"] = "kernel"
        added["args"] = {"stream": stream, **described}
        if launch is not None:
            launched = launch.setdefault("args", {})
            if "correlation" not in launched:
                launched["correlation"] = next(self._correlations)
            added["args"]["correlation"] = launched["correlation"]

    def _name_lane(self, stream: int, name: str) -> None:
        place = {"ph": "M", "pid": self._pid, "tid": _FIRST_LANE + stream, "ts": 0}
        self.events += [
            {**place, "name": "thread_name", "args": {"name": name}},
            {**place, "name": "thread_sort_index", "args": {"sort_index": _FIRST_LANE + stream}},
        ]


class _ByTime:
    """Events by time."""

    def __init__(self, events: list[Event]) -> None:
        self._events = sorted(events, key=lambda event: event["ts"])
        self._begins = [event["ts"] for event in self._events]
        self._taken: set[int] = set()

    def at(self, moment: float, *, take: bool = False) -> Event | None:
        """Return the event that contains ``moment``, or None.

        Args:
            take: do not return the same event again.
        """
        for error in (0.0, _CLOCK_ERROR_US):
            after = bisect_right(self._begins, moment + error)
            # The last one that began before, or an earlier one: ranges of a batch contain each other.
            for index in range(after - 1, max(-1, after - 1 - _MAX_NESTED), -1):
                event = self._events[index]
                if index not in self._taken and moment <= event["ts"] + event["dur"] + error:
                    if take:
                        self._taken.add(index)
                    return event
        return None
