"""Merging equal lines of several ranks, and the prefixes of lines."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.output.collapse import HOLD_S, MAX_HELD_BYTES, LineCollapser
from shoal.launch.output.line_format import LineFormat

from .conftest import PRELUDE, Workshop

Written = list[tuple[str, bytes, bytes | None]]


class Lines:
    """A collapser of ranks "a", "b", ..., and what it has written."""

    def __init__(self, ranks: str) -> None:
        self.written: Written = []
        self.collapser = LineCollapser(self._write)
        for rank in ranks:
            self.collapser.add(rank)

    def _write(self, ranks: list[str], stamp: bytes, text: bytes, end: bytes | None) -> None:
        self.written.append(("".join(sorted(ranks)), text, end))

    def put(self, rank: str, *texts: str, end: bytes | None = b"\n") -> None:
        for text in texts:
            self.collapser.put(rank, b"", text.encode(), end)

    def release_all(self) -> None:
        while self.collapser.next_release() < math.inf:
            self.collapser.release_oldest()

    def take(self) -> list[str]:
        """The lines written since the last call, as ``a b: text``."""
        found = [f"{ranks}: {text.decode()}" for ranks, text, _ in self.written]
        self.written.clear()
        return found


def test_a_line_that_every_rank_has_written_is_written_at_once() -> None:
    lines = Lines("abc")
    lines.put("a", "loss 1", "loss 2")
    lines.put("c", "loss 1")
    assert lines.take() == []
    lines.put("b", "loss 1")
    assert lines.take() == ["abc: loss 1"]
    before = lines.collapser.next_release()
    assert before <= time.monotonic() + HOLD_S
    lines.collapser.release_oldest()
    assert lines.take() == ["a: loss 2"]
    assert lines.collapser.next_release() == math.inf


def test_a_line_after_lines_that_differ_is_merged_too() -> None:
    lines = Lines("abcd")
    for rank in "abc":
        lines.put(rank, f"pid of {rank}", "ready", "go")
    lines.collapser.release_oldest()
    lines.collapser.release_oldest()
    assert lines.take() == ["a: pid of a", "b: pid of b", "c: pid of c", "abc: ready"]
    lines.put("d", "go")
    assert lines.take() == ["abcd: go"]


def test_a_repeated_line_is_merged_once_for_each_time_that_a_rank_wrote_it() -> None:
    lines = Lines("abc")
    lines.put("a", "x", "x", "x")
    lines.put("b", "x", "x")
    lines.put("c", "y")
    lines.release_all()
    assert lines.take() == ["ab: x", "ab: x", "a: x", "c: y"]


def test_lines_that_differ_in_any_byte_or_in_their_end_are_not_equal() -> None:
    lines = Lines("abcd")
    lines.put("a", "rank 1")
    lines.put("b", "rank 2")
    lines.put("c", "\x1b[1mrank 1")
    lines.put("d", "rank 1", end=b"\r\n")
    lines.release_all()
    assert lines.take() == ["a: rank 1", "b: rank 2", "c: \x1b[1mrank 1", "d: rank 1"]


def test_a_progress_bar_is_passed_on_at_once_and_in_order() -> None:
    lines = Lines("ab")
    lines.put("a", "10%", end=b"\r")
    lines.put("a", "20%", end=None)
    lines.put("b", "20%", end=b"\r")
    lines.put("a", "100%")  # the end of the bar
    assert lines.take() == ["a: 10%", "a: 20%", "b: 20%", "a: 100%"]
    lines.put("b", "100%")
    lines.put("a", "warning")
    lines.put("a", "0%", end=b"\r")
    assert lines.take() == ["b: 100%"]
    lines.put("b", "warning")
    lines.release_all()
    assert lines.take() == ["ab: warning", "a: 0%"]


def test_ranks_that_have_ended_are_not_waited_for_and_keep_their_lines() -> None:
    lines = Lines("abc")
    lines.put("a", "last")
    lines.collapser.end("a")
    lines.collapser.end("c")
    lines.put("b", "last", "more")
    assert lines.take() == ["ab: last", "b: more"]
    lines.collapser.end("b")
    assert lines.collapser.next_release() == math.inf


def test_a_flood_of_lines_is_released_before_it_fills_the_memory() -> None:
    lines = Lines("abc")
    text = "x" * 1000
    count = 0
    while not lines.written:
        lines.put("a", f"{count} {text}")
        count += 1
        assert count * len(text) <= MAX_HELD_BYTES
    assert lines.take() == [f"a: 0 {text}"]
    for number in range(1, count):
        lines.put("b", f"{number} {text}")
        assert len(lines.collapser._held) <= count
    lines.release_all()
    assert lines.take() == [f"ab: {number} {text}" for number in range(1, count)]


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from([b"\n"] * 4 + [b"\r", None])
            ),
            st.sampled_from("abc!"),
        ),
        max_size=40,
    )
)
def test_no_line_is_lost_doubled_or_moved(events: list[tuple[str, str, bytes | None] | str]) -> None:
    lines = Lines("abc")
    given_lines: dict[str, list[tuple[bytes, bytes | None]]] = defaultdict(list)
    ended: set[str] = set()
    for event in events:
        if event == "!":
            lines.collapser.release_oldest()
        elif isinstance(event, str):
            if event not in ended:
                ended.add(event)
                lines.collapser.end(event)
        elif event[0] not in ended:
            rank, text, end = event
            lines.put(rank, text, end=end)
            given_lines[rank].append((text.encode(), end))
    lines.release_all()
    for rank in "abc":
        assert [(text, end) for ranks, text, end in lines.written if rank in ranks] == given_lines[rank]
    assert not lines.collapser._holders
    assert lines.collapser._held_bytes == 0
    assert set(lines.collapser._queues) == set("abc") - ended


@dataclass
class Process:
    slot: int
    restart: int = 0


def test_labels_are_as_wide_as_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    job = [Process(slot) for slot in range(12)]
    form = LineFormat(collapse=True)

    def label(*ranks: Process, terminal: bool = False) -> str:
        return form.ranks(ranks, 12, terminal=terminal).decode()

    assert label(*job) == "[0-11] "
    assert label(job[7]) == "[   7] "
    assert label(job[2], job[0], job[1], Process(3, 1)) == "[0-2,3.1] "
    assert label(job[0], job[1], terminal=True) == "\x1b[1m[ 0,1]\x1b[0m "
    assert form.width(12) == len("[0-11] ")
    assert LineFormat(timestamps=True).width(2) == len("2026-11-29T14:03:32.123 [0] ")
    assert LineFormat(label=False).width(2) == 0
    assert LineFormat(label=False).ranks(job, 12, terminal=True) == b""


#: ``shoal run`` that holds lines until the end of the job, so that load on the machine changes nothing
LONG_HOLD = """
import sys
import shoal.launch.output.collapse as collapse
from shoal.launch.cli import main
collapse.HOLD_S = 3600.0
main()
"""


def collapsed(workshop: Workshop, script: str, *options: str) -> tuple[int, list[str], list[str]]:
    """Exit code and lines of a job with ``--collapse``."""
    (workshop.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    argv = [sys.executable, "-c", LONG_HOLD, "run", *options, "--collapse", "script.py"]
    code, out, err = workshop.end(workshop.start_process(argv))
    return code, out.decode().splitlines(), err.decode().splitlines()


SCRIPT = """
print("loss 0.1")
print(f"rank {rank}")
print("loss 0.1", file=sys.stderr)
if rank == 0:
    for step in range(3):
        sys.stdout.write(f"\\r{step}/2")
    sys.stdout.write("\\n")
print("the end")
"""


def test_equal_lines_are_one_line_and_a_progress_bar_stays_one(workshop: Workshop) -> None:
    code, out, err = collapsed(workshop, SCRIPT, "-n", "3")
    assert (code, err) == (0, ["[0-2] loss 0.1"])
    bar = ["[  0] ", "[  0] 0/2", "[  0] 1/2", "[  0] 2/2"]  # each update has its prefix
    assert out[0] == "[0-2] loss 0.1"
    assert out[-1] == "[0-2] the end"
    assert sorted(out) == sorted(["[0-2] loss 0.1", *(f"[  {i}] rank {i}" for i in range(3)), *bar, out[-1]])
    assert [line for line in out if line in bar] == bar


def test_held_lines_come_before_the_message_on_a_failure(workshop: Workshop) -> None:
    script = """
    print("starting", rank, file=sys.stderr)
    tell(f"started{rank}")
    if rank == 1:
        await_file("started0")
        sys.exit(3)
    await_signal()
    """
    code, _, err = collapsed(workshop, script, "-n", "2")
    assert code == 3
    assert sorted(err[:2]) == ["[  0] starting 0", "[  1] starting 1"]
    assert err[2].startswith("shoal: rank 1 failed first: exit code 3")


def test_a_line_that_the_other_ranks_never_write_is_shown_while_they_run(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text(
        PRELUDE + "print('alone') if rank == 0 else None\nawait_file('go')"
    )
    launcher = workshop.shoal("run", "-n", "2", "--collapse", "script.py")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"[  0] alone\n"
    (workshop.path / "go").touch()
    assert workshop.end(launcher)[0] == 0
