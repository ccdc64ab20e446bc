"""Whole programs on ranks, as the tests run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import run_program

HANGS = """
import atexit, os, threading

def hang_at_the_end():
    threading.Event().wait()

print("rank", os.environ["SHOAL_RANK"], "comes to its end")
if os.environ["SHOAL_RANK"] == "1":
    atexit.register(hang_at_the_end)
"""


def test_a_rank_that_does_not_end_shows_what_it_wrote_and_where_its_threads_are(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    with pytest.raises(AssertionError) as caught:
        run_program(script, 2, folder=tmp_path, timeout=3.0)
    text = str(caught.value)
    assert "None] (None: killed after 3.0 s)" in text
    assert "rank 1 comes to its end" in text
    assert "in hang_at_the_end" in text
