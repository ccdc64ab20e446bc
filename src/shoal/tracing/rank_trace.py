"""The trace of one rank: a Chrome trace made from its spool.

- The process of the trace is the rank.  Each lane of each group is a thread, whose operations do not overlap.
- A collective is a slice from when its turn in its lane came until its end, with slices for the wait for the
  last member and for moving the data after it.
- Messages, and collectives that callbacks issue, overlap, and are asynchronous events.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common import chrome_trace
from ..common.atomic_file import AtomicFile
from ..common.chrome_trace import Event, Timeline
from ..op_kind import KIND_NAMES
from .spool import OperationTimes, SpoolContents, TracedGroup, read_spool

#: categories of events
COLLECTIVE, WAIT, MOVE, MESSAGE, KEYED = "collective", "wait", "move", "message", "keyed"
_SEND, _RECV = "send", "recv"


def wait_name(rank: int) -> str:
    """The name of a slice of waiting; -1: it is not known for whom."""
    return f"wait for rank {rank}" if rank >= 0 else "wait"


class RankTrace:
    """The events of a spool."""

    def __init__(self, contents: SpoolContents) -> None:
        self._contents = contents
        self._pid = contents.rank.rank
        self._timeline = Timeline(contents.rank.begun)
        self._groups = {ident: group for ident, group in contents.groups.items() if not group.internal}
        for each in contents.records():
            if each.group not in self._groups:  # never, unless the file was changed
                self._groups[each.group] = TracedGroup(each.group, f"group {each.group:#x}", (), 1)
        self._tids: dict[int, int] = {}
        tid = 0
        for ident, group in self._groups.items():
            self._tids[ident] = tid
            tid += group.lanes

    def other(self) -> dict[str, Any]:
        """``otherData``, by which ``shoal trace merge`` knows the rank and its groups."""
        contents = self._contents
        groups = [
            {
                "tid": self._tids[group.ident], "lanes": group.lanes, "ident": f"{group.ident:#x}",
                "name": group.name, "ranks": group.ranks,
            }
            for group in self._groups.values()
        ]  # fmt: skip
        return {
            "rank": contents.rank,
            "groups": groups,
            "dropped": contents.dropped,
            "truncated": contents.truncated,
        }

    def events(self) -> Iterator[Event]:
        """All events, in the order in which operations ended."""
        rank = self._contents.rank
        yield chrome_trace.process_name(self._pid, f"rank {rank.rank}")
        yield chrome_trace.process_order(self._pid, rank.rank)
        for group in self._groups.values():
            yield self._lane_name(group, 0)
        last_ends = dict.fromkeys(self._tids.values(), 0)
        for number, each in enumerate(self._contents.records()):
            group = self._groups[each.group]
            name = KIND_NAMES.get(each.kind, f"operation {each.kind}")
            if name in (_SEND, _RECV):
                yield from self._overlapping(
                    each, group, f"{name} {_peer(name, each, group)}", MESSAGE, number
                )
            elif each.keyed:
                yield from self._overlapping(each, group, name, KEYED, number)
            else:
                yield from self._collective(each, group, name, last_ends)

    def _lane_name(self, group: TracedGroup, lane: int) -> Event:
        name = group.name if group.lanes == 1 else f"{group.name}, lane {lane}"
        return chrome_trace.thread_name(self._pid, self._tids[group.ident] + lane, name)

    def _collective(
        self, each: OperationTimes, group: TracedGroup, name: str, last_ends: dict[int, int]
    ) -> Iterator[Event]:
        lane = each.channel % group.lanes
        tid = self._tids[each.group] + lane
        if tid not in last_ends:
            last_ends[tid] = 0
            yield self._lane_name(group, lane)
        args = {"number": each.channel, **self._args(each, group)}
        if each.failed and not each.begun:
            yield self._timeline.instant(name, COLLECTIVE, self._pid, tid, each.ended, args)
            return
        # An operation that began before the trace has no begin.
        begun = max(each.begun or each.submitted, self._contents.rank.begun, last_ends[tid])
        ended = max(each.ended, begun)
        last_ends[tid] = ended
        if begun - each.submitted >= 1000:  # an earlier operation of the lane was in progress
            args["queued_us"] = (begun - each.submitted) / 1e3
        yield self._timeline.slice(name, COLLECTIVE, self._pid, tid, begun, ended, args)
        if not each.waited:
            return
        waited = min(max(each.waited, begun), ended)
        called = min(max(each.called, waited), ended)
        last = _world_rank(group, each.last)
        yield self._timeline.slice(
            wait_name(last), WAIT, self._pid, tid, waited, called, {"number": each.channel, "last": last}
        )
        if not each.failed:
            yield self._timeline.slice(MOVE, MOVE, self._pid, tid, called, ended, {"number": each.channel})

    def _overlapping(
        self, each: OperationTimes, group: TracedGroup, name: str, category: str, number: int
    ) -> Iterator[Event]:
        begun = max(each.begun or each.submitted, self._contents.rank.begun)
        args = self._args(each, group)
        if category == KEYED:
            args["key"] = f"{each.channel:#x}"
        if each.waited:
            args["waited_us"] = max(0, each.called - max(each.waited, begun)) / 1e3
        return self._timeline.interval(
            name, category, self._pid, self._tids[each.group], f"{number:#x}", begun, max(begun, each.ended),
            args,
        )  # fmt: skip

    def _args(self, each: OperationTimes, group: TracedGroup) -> dict[str, object]:
        args: dict[str, object] = {"group": group.name, "bytes": each.bytes}
        if each.waited:
            args["last"] = _world_rank(group, each.last)
        if each.failed:
            args["failed"] = True
        return args


def _peer(name: str, each: OperationTimes, group: TracedGroup) -> str:
    rank = _world_rank(group, each.peer)
    if name == _SEND:
        return f"to rank {rank}"
    return f"from rank {rank}" if rank >= 0 else "from any rank"


def _world_rank(group: TracedGroup, member: int) -> int:
    return group.ranks[member] if 0 <= member < len(group.ranks) else -1


def write_rank_trace(spool: Path, target: Path) -> SpoolContents:
    """Write the trace of a spool, readable by the owner only, and delete the spool; return its contents.

    Raises:
        OSError: the trace cannot be written.  The spool stays.
    """
    contents = read_spool(spool)
    made = RankTrace(contents)
    with AtomicFile(target, mode=0o600) as draft:
        chrome_trace.write_trace(draft.file, made.events(), made.other())
        draft.replace()
    os.unlink(spool)
    return contents
