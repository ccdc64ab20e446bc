"""Files of torch's flight recorder, made from the dumps of groups, for torch's analyser ``torchfrtrace``.

The format is that of ``torch/distributed/flight_recorder``: for each rank of the world a pickled dict with
all groups of the process.  The analyser matches operations by group and sequence number, which does not work
for operations in callbacks, single messages, and a recorder that has dropped its oldest operations.  This
module sees the files of all ranks, and prepares the operations:

- Numbers that one rank's recorder no longer has are omitted on all ranks.
- An operation in a callback has its key as the number.  It is included while it is incomplete on any rank.
- An incomplete message is an operation of a group of two, its sender and its receiver.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..common.atomic_file import AtomicFile
from .dump_files import Dump, DumpedOperation, GroupDumps

#: version of torch's format
_VERSION = "2.10"
#: prefix of operations; older releases of the analyser accept only this one and that of XPUs
_PREFIX = "nccl:"
#: the analyser expects that all files have the same name except for the rank at its end
_FILE_PREFIX = "shoal_rank_"
_FRAME = re.compile(r"(.*):(\d{1,9}) in (.*)", re.DOTALL)
_INCOMPLETE = ("submitted", "failed")

#: an entry of torch's format without the fields that depend on its place in the file
Entry = dict[str, Any]


class _Group(NamedTuple):
    """A group in torch's terms; ranks are numbered in the world."""

    name: str
    ranks: tuple[int, ...]
    entries: dict[int, list[Entry]]  #: by rank


def write(found: GroupDumps, folder: Path) -> list[Path]:
    """Write a file for each rank into ``folder``, and return their paths.

    Args:
        folder: a new or empty directory, because the analyser reads all files in it.

    Raises:
        OSError: ``folder`` has files, or cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(0, "the directory is not empty; pass a new one", str(folder))
    groups = []
    for (_, name, ranks), members in found.items():
        groups.append(_Group(name, ranks, _in_world(ranks, _collectives(members))))
        for pair, entries in _messages(members).items():
            groups.append(
                _Group(f"messages of {name}", tuple(ranks[rank] for rank in pair), _in_world(ranks, entries))
            )
    paths = []
    for rank in sorted({rank for group in groups for rank in group.entries}):
        paths.append(folder / f"{_FILE_PREFIX}{rank}")
        with AtomicFile(paths[-1], mode=0o600) as draft:
            pickle.dump(_content(groups, rank), draft.file)
            draft.replace()
    return paths


def _in_world(ranks: tuple[int, ...], entries: dict[int, list[Entry]]) -> dict[int, list[Entry]]:
    return {ranks[rank]: own for rank, own in entries.items()}


def _content(groups: list[_Group], rank: int) -> dict[str, Any]:
    """Return the content of the file of one rank."""
    own = {str(number): group for number, group in enumerate(groups) if rank in group.entries}
    entries = [
        {"pg_id": int(ident), "process_group": (ident, group.name), **entry}
        for ident, group in own.items()
        for entry in group.entries[rank]
    ]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return {
        "version": _VERSION,
        "pg_config": {
            ident: {"name": ident, "desc": group.name, "ranks": str(sorted(group.ranks))}
            for ident, group in own.items()
        },
        "pg_status": {ident: _status(group.entries[rank]) for ident, group in own.items()},
        "entries": [{"record_id": number, **entry} for number, entry in enumerate(entries)],
    }


def _status(entries: list[Entry]) -> dict[str, int]:
    numbers = [entry["collective_seq_id"] for entry in entries if not entry["is_p2p"]]
    completed = [entry["collective_seq_id"] for entry in entries if entry["state"] == "completed"]
    return {
        "last_enqueued_collective": max(numbers, default=-1),
        "last_started_collective": max(numbers, default=-1),
        "last_completed_collective": max(completed, default=-1),
    }


# -- collectives -------------------------------------------------------------------------------


def _ident(operation: DumpedOperation) -> int:
    return operation.number if operation.number >= 0 else operation.key


def _collectives(members: Mapping[int, Dump]) -> dict[int, list[Entry]]:
    """Return the entries of a group's collectives by rank."""
    operations = {
        rank: [one for one in dump.entries if one.number >= 0 or one.key] for rank, dump in members.items()
    }
    alike: dict[int, dict[int, DumpedOperation]] = {}
    for rank, own in operations.items():
        for one in own:
            alike.setdefault(_ident(one), {})[rank] = one
    oldest = max(
        min((one.number for one in own if one.number >= 0), default=0) for own in operations.values()
    )
    incomplete = {_ident(one) for own in operations.values() for one in own if one.state in _INCOMPLETE}
    errors = [dump.error.type for dump in members.values() if dump.error is not None]

    def entry(rank: int, one: DumpedOperation) -> Entry:
        others = alike[_ident(one)]
        is_completed = any(other.state == "completed" for other in others.values())
        dump = members[rank]
        size = len(dump.ranks)
        sizes = _sizes(one, rank, size)
        if one.kind in _PARTED and (is_completed or "CollectiveMismatch" not in errors):
            parts = {_part(other, of == other.root, size) for of, other in others.items()}
            if len(parts) > 1 or not parts.pop().is_integer():
                # Parts of different sizes are legal, but the analyser takes them for a mismatch.
                sizes = tuple(None if count is None else 0 for count in sizes)
        # A rank that released the future of an operation does not know whether it has completed.
        has_completed = one.state == "completed" or (one.state == "released" and is_completed)
        return _entry(dump, one, one.kind, _ident(one), sizes, "completed" if has_completed else "scheduled")

    return {
        rank: [
            entry(rank, one)
            for one in own
            if (one.number >= oldest if one.number >= 0 else one.key in incomplete)
        ]
        for rank, own in operations.items()
    }


#: kinds whose parts may have different sizes on different ranks
_PARTED = ("all_gather", "gather", "scatter", "reduce_scatter")


def _part(operation: DumpedOperation, is_root: bool, size: int) -> float:
    """The number of elements of one rank's part."""
    is_whole = operation.kind == "reduce_scatter" or (operation.kind == "scatter" and is_root)
    return operation.count / size if is_whole else float(operation.count)


def _sizes(operation: DumpedOperation, rank: int, size: int) -> tuple[int | None, ...]:
    """The number of elements of the input and the output; None if this rank has none."""
    count, is_root = operation.count, rank == operation.root
    match operation.kind:
        case "barrier":
            return None, None
        case "all_gather":
            return count, count * size
        case "gather":
            return count, count * size if is_root else None
        case "scatter":
            return (count, count // size) if is_root else (None, count)
        case "reduce_scatter":
            return count, count // size
        case _:
            return count, count


# -- messages ----------------------------------------------------------------------------------


def _messages(members: Mapping[int, Dump]) -> dict[tuple[int, int], dict[int, list[Entry]]]:
    """Return the entries of incomplete messages by pair of ranks, and by rank.

    Messages from one rank to another with the same tag are matched in order.
    """
    found: dict[tuple[int, int], dict[int, list[Entry]]] = {}
    numbers: dict[tuple[int, int, int, int], int] = {}
    for rank, dump in members.items():
        counts: dict[tuple[str, int, int], int] = {}
        for one in dump.entries:
            is_message = one.kind in ("send", "recv") and 0 <= one.peer < len(dump.ranks)
            if not is_message or one.state not in _INCOMPLETE:
                continue
            pair = (min(rank, one.peer), max(rank, one.peer))
            source, target = (rank, one.peer) if one.kind == "send" else (one.peer, rank)
            position = counts[one.kind, one.peer, one.tag] = counts.get((one.kind, one.peer, one.tag), 0) + 1
            ident = numbers.setdefault((source, target, one.tag, position), len(numbers))
            arrow = "->" if one.kind == "send" else "<-"
            name = f"{one.kind} {pair.index(rank)}{arrow}{pair.index(one.peer)}"
            # A receive need not know the size, so none is compared: the receiver checks it.
            own: dict[int, list[Entry]] = {member: [] for member in pair if member in members}
            found.setdefault(pair, own)[rank].append(_entry(dump, one, name, ident, (0, 0), "scheduled"))
    return found


# -- one entry ---------------------------------------------------------------------------------


def _entry(
    dump: Dump, operation: DumpedOperation, name: str, ident: int, sizes: tuple[int | None, ...], state: str
) -> Entry:
    is_p2p = operation.kind in ("send", "recv")
    given, got = ([] if count is None else [count] for count in sizes)
    dtypes = [operation.dtype] if operation.dtype else []
    ended = operation.ended if state == "completed" else 0
    return {
        "collective_seq_id": ident,
        "p2p_seq_id": ident if is_p2p else 0,
        "op_id": ident,
        "profiling_name": _PREFIX + name,
        "time_created_ns": _real_time(dump, operation.submitted),
        "duration_ms": (ended - operation.submitted) / 1e6 if ended else None,
        "input_sizes": [given],
        "input_dtypes": dtypes,
        "output_sizes": [got],
        "output_dtypes": dtypes,
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": _real_time(dump, ended) if ended else None,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": is_p2p,
        # The recorder keeps no stacks: where the main thread was while the operation was incomplete.
        "frames": list(_frames(dump)) if operation.state in _INCOMPLETE else [],
    }


def _real_time(dump: Dump, monotonic_ns: int) -> int:
    """Convert a time of an entry to nanoseconds since 1970."""
    return int(dump.time * 1e9) - (dump.now - monotonic_ns)


def _frames(dump: Dump) -> Iterator[dict[str, Any]]:
    """Yield the frames of the main thread, innermost first."""
    for stack in dump.stacks:
        if stack.thread == "MainThread":
            for frame in reversed(stack.frames):
                if found := _FRAME.fullmatch(frame):
                    yield {"name": found[3], "filename": found[1], "line": int(found[2])}
