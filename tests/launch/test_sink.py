"""Putting lines of several sources into one file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from shoal.launch.output.sink import DescriptorWriter, Sink


def written(act: Callable[[Sink], None], *, terminal: bool) -> bytes:
    """What a sink writes."""
    reader, writer = os.pipe()
    ended = threading.Event()
    sink = Sink(writer, ended.set, terminal=terminal)
    act(sink)
    sink.close()
    assert ended.wait(30)
    os.close(writer)
    with open(reader, "rb") as file:
        return file.read()


def test_lines_are_written_as_they_come() -> None:
    def act(sink: Sink) -> None:
        sink.line("a", b"[0] ", "über".encode(), b"\n")
        sink.line("b", b"[1] ", b"\0\xff", b"\r\n")

    assert written(act, terminal=False) == "[0] über\n".encode() + b"[1] \0\xff\r\n"


def test_updates_in_a_file_are_whole_lines_of_one_rank_between_newlines() -> None:
    def act(sink: Sink) -> None:
        sink.line("a", b"[0] ", b"10%", b"\r")
        sink.line("a", b"[0] ", b"20%", b"\r")
        sink.line("b", b"[1] ", b"hello", b"\n")
        sink.line("a", b"[0] ", b"30%", b"\r")

    assert written(act, terminal=False) == b"[0] 10%\r[0] 20%\r\n[1] hello\n[0] 30%\r\n"


class Screen:
    """Just enough of a terminal to show what a user sees."""

    def __init__(self, data: bytes) -> None:
        text = data.decode().replace("\x1b[?7l", "").replace("\x1b[?7h", "")
        self.rows = []
        for row in text.split("\n"):
            shown = row.split("\r\x1b[K")[-1]
            assert "\x1b" not in shown
            self.rows.append(shown)


def test_on_a_terminal_lines_appear_above_an_open_progress_bar() -> None:
    def act(sink: Sink) -> None:
        sink.line("a", b"[0] ", b"10%", b"\r")
        sink.line("b", b"[1] ", b"hello", b"\n")
        sink.draw("a", b"[0] ", b"\x1b[2K20%")
        sink.line("b", b"[1] ", b"world", b"\n")
        sink.line("a", b"[0] ", b"100%", b"\n")
        sink.line("b", b"[1] ", b"end", b"\n")

    expected = ["[1] hello", "[1] world", "[0] 100%", "[1] end", ""]
    assert Screen(written(act, terminal=True)).rows == expected


def test_an_open_line_is_finished_in_the_end() -> None:
    data = written(lambda sink: sink.draw("a", b"[0] ", b"name? "), terminal=True)
    assert Screen(data).rows == ["[0] name? ", ""]


def test_a_cursor_that_a_killed_rank_hid_is_shown_again() -> None:
    data = written(lambda sink: sink.line("a", b"", b"\x1b[?25lbar", b"\n"), terminal=True)
    assert data.endswith(b"\x1b[?25h")


def test_a_writer_without_a_reader_drops_what_it_gets_and_ends() -> None:
    reader, end = os.pipe()
    os.close(reader)
    ended = threading.Event()
    writer = DescriptorWriter(end, ended.set)
    writer.write(b"lost")
    assert ended.wait(30)
    assert writer.broken
    ended.clear()
    writer.write(b"lost too")
    writer.close()
    assert ended.wait(30)
    os.close(end)


def test_a_writer_says_when_it_is_full_and_when_there_is_room_again() -> None:
    reader, end = os.pipe()
    room = threading.Event()
    writer = DescriptorWriter(end, room.set)
    block = b"." * (1 << 20)
    for _ in range(5):
        writer.write(block)
    assert writer.full
    count = 0
    while count < 5 * len(block):
        count += len(os.read(reader, 1 << 20))
    assert room.wait(30)
    assert not writer.full
    writer.close()
    writer.join(30)
    os.close(reader)
    os.close(end)


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_said_is_nothing_written(terminal: bool) -> None:
    assert written(lambda sink: None, terminal=terminal) == b""
