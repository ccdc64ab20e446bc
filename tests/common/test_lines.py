"""Cutting a stream into lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.common.lines import MAX_LINE_BYTES, TAIL_LINES, LineSplitter


def cut(*chunks: bytes) -> list[tuple[bytes, bytes]]:
    lines = LineSplitter()
    return [piece for chunk in chunks for piece in lines.feed(chunk)] + list(lines.close())


def test_lines_are_cut_at_every_kind_of_end() -> None:
    assert cut(b"a\nb\r\nc\rd\n") == [(b"a", b"\n"), (b"b", b"\r\n"), (b"c", b"\r"), (b"d", b"\n")]


def test_an_end_of_two_bytes_may_come_in_two_chunks() -> None:
    assert cut(b"a\r", b"\nb\r", b"c") == [(b"a", b"\r\n"), (b"b", b"\r"), (b"c", b"\n")]


def test_a_last_line_without_an_end_gets_one() -> None:
    assert cut(b"a\nb") == [(b"a", b"\n"), (b"b", b"\n")]
    assert cut(b"a\r") == [(b"a", b"\r")]
    assert cut() == []


@given(st.lists(st.text(alphabet="ab\r\n").map(str.encode)))
def test_chunks_make_no_difference(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    pieces = cut(*chunks)
    assert pieces == cut(whole)
    again = b"".join(text + end for text, end in pieces)
    assert again in (whole, whole + b"\n")


def test_an_endless_line_is_broken() -> None:
    lines = LineSplitter()
    pieces = [piece for _ in range(20) for piece in lines.feed(b"." * (MAX_LINE_BYTES // 8))]
    assert pieces == [(b"." * (MAX_LINE_BYTES // 8 * 9), b"\n")] * 2


def test_the_tail_holds_the_last_lines_and_only_the_last_state_of_a_progress_bar() -> None:
    lines = LineSplitter()
    list(lines.feed(b"".join(b"%d\n" % i for i in range(100))))
    list(lines.feed(b"\r10%\r20%\r30%\nend"))
    list(lines.close())
    assert list(lines.tail) == [b"%d" % i for i in range(102 - TAIL_LINES, 100)] + [b"30%", b"end"]
