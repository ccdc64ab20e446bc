"""Numbers, ranks and exceptions in sentences."""

from __future__ import annotations

import asyncio

import pytest

from shoal.common.formatting import (
    counted,
    describe_error,
    error_repr,
    format_seconds,
    ranks_named,
    text_of,
    traceback_of,
)


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_a_time_has_three_digits_that_matter_and_whole_seconds_from_a_hundred_on() -> None:
    times = (0.25, 4.950223, 5.0, 99.97, 299.99, 1800.0)
    assert [format_seconds(time) for time in times] == ["0.25 s", "4.95 s", "5 s", "100 s", "300 s", "1800 s"]


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([3], "rank 3"),
        ({1, 0}, "ranks 0, 1"),
        ([5, 0, 3, 4, 2], "ranks 0, 2-5"),
        ([0, 1, 3, 5, 6, 7], "ranks 0, 1, 3, 5-7"),
    ],
)
def test_ranks_are_named_in_order_and_three_in_a_row_as_a_range(ranks: list[int], named: str) -> None:
    assert ranks_named(ranks) == named


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyError("x"), "KeyError: 'x'"), (AssertionError(), "AssertionError"), (_Mute(), "_Mute")],
)
def test_an_exception_in_words_has_no_colon_without_a_text_and_never_fails(
    error: Exception, words: str
) -> None:
    assert describe_error(error) == words


class Word(str):
    def __format__(self, form: str) -> str:
        raise SystemExit(3)

    __str__ = __format__  # type: ignore[assignment]


@pytest.mark.parametrize("raised", [ValueError, asyncio.CancelledError, SystemExit])
def test_an_exception_that_cannot_be_shown_is_named(raised: type[BaseException]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise raised("no words")

        __repr__ = __str__

    error = Mute()
    assert (describe_error(error), text_of(error), error_repr(error)) == ("Mute", "", "Mute")
    assert "Mute" in traceback_of(error, error.__traceback__)


def test_a_text_of_another_class_is_read_as_text() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return Word("words")

    assert describe_error(Odd()) == "Odd: words"


def test_a_ctrl_c_while_an_exception_is_shown_is_raised() -> None:
    class Slow(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        describe_error(Slow())
