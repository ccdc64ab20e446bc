"""Reading of Chrome traces as a viewer does, with the rules that their events must follow."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

#: microseconds: the last digit of sums of times
_ROUNDING = 2e-3


class ChromeTrace:
    """A trace whose slices are nested, whose intervals end, and whose arrows lead from a slice to others."""

    def __init__(self, path: Path) -> None:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = json.loads(data)
        self.events: list[Event] = content["traceEvents"]
        self.other: dict[str, Any] = content["otherData"]
        assert all(event["ts"] >= 0 for event in self.events if event["ph"] != "M")
        self._rank_of = {each["pid"]: each["process"]["rank"] for each in self.other.get("ranks", [])}
        self._check_nesting()
        self._check_intervals()
        #: (pid of the last rank, number of the collective) -> pids of the ranks that waited for it
        self.arrows = self._arrows()

    def slices(self, category: str, pid: int | None = None) -> list[Event]:
        return [
            event
            for event in self.events
            if event["ph"] == "X" and event["cat"] == category and pid in (None, event["pid"])
        ]

    def intervals(self, category: str) -> list[Event]:
        return [event for event in self.events if event["ph"] == "b" and event["cat"] == category]

    def names(self, what: str) -> set[str]:
        return {event["args"]["name"] for event in self.events if event["name"] == f"{what}_name"}

    def _check_nesting(self) -> None:
        tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X" and event["cat"] in ("collective", "wait", "move"):
                tracks[event["pid"], event["tid"]].append(event)
        for track in tracks.values():
            open_slices: list[Event] = []
            for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
                while open_slices and _end(open_slices[-1]) <= event["ts"] + _ROUNDING:
                    open_slices.pop()
                if event["cat"] == "collective":
                    assert not open_slices, (event, open_slices)
                elif event["dur"] > _ROUNDING:  # else it may be at the end of the collective
                    (outer,) = open_slices
                    assert outer["args"]["number"] == event["args"]["number"]
                    assert _end(event) <= _end(outer) + _ROUNDING
                open_slices += [event] if event["cat"] == "collective" else []

    def _check_intervals(self) -> None:
        pairs: dict[tuple[int, str], list[str]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "be" and event["cat"] in ("message", "keyed"):
                pairs[event["pid"], event["id"]].append(event["ph"])
        assert all(phases == ["b", "e"] for phases in pairs.values())

    def _arrows(self) -> dict[tuple[int, int], set[int]]:
        flows: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.get("cat") == "last to arrive":
                flows[event["id"]].append(event)
        found: dict[tuple[int, int], set[int]] = {}
        for parts in flows.values():
            (start,) = (event for event in parts if event["ph"] == "s")
            ends = [event for event in parts if event["ph"] == "f"]
            assert ends
            assert len(ends) + 1 == len(parts)
            (outer,) = self._around(start, "collective")
            waiting = set()
            for end in ends:
                assert end["bp"] == "e"
                assert end["ts"] >= start["ts"]
                (wait,) = self._around(end, "wait")
                last = self._rank_of[start["pid"]]
                assert wait["args"] == {"number": outer["args"]["number"], "last": last}
                waiting.add(end["pid"])
            assert len(waiting) == len(ends)
            found[start["pid"], outer["args"]["number"]] = waiting
        return found

    def _around(self, point: Event, category: str) -> list[Event]:
        return [
            event
            for event in self.slices(category, point["pid"])
            if event["tid"] == point["tid"] and event["ts"] <= point["ts"] + 1e-4 < _end(event)
        ]


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end
