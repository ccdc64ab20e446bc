"""Numbers, ranks and exceptions in sentences."""

from __future__ import annotations

import pytest

from shoal.wording import counted, in_seconds, in_words, ranks_named


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_a_time_has_three_digits_that_matter_and_whole_seconds_from_a_hundred_on() -> None:
    times = (0.25, 4.950223, 5.0, 99.97, 299.99, 1800.0)
    assert [in_seconds(time) for time in times] == ["0.25 s", "4.95 s", "5 s", "100 s", "300 s", "1800 s"]


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
    assert in_words(error) == words
