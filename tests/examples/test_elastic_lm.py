"""The language model that loses ranks: new processes take their places, and the curve is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.load import EXAMPLES, load
from tests.support.quick_launcher import QuickLauncher

#: the script with a small network; who is alone waits for others, so that they can come
SMALL = """
import sys, time
sys.path.insert(0, {examples!r})
import elastic_lm as lm
from shoal.elastic import Step
lm.SETTINGS = lm.Settings(batch=6, context=16, width=16, layers=1, heads=2)
text = open({source!r}, "rb").read()
lm.read_library = lambda: (text, text)
commit = Step.commit
def slowly(step):
    if step._session.group.size == 1:
        while not step._session.waiting:
            time.sleep(0.01)
        time.sleep(0.3)
    commit(step)
Step.commit = slowly
lm.main()
"""


def test_the_curve_is_that_of_a_run_without_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(examples=str(EXAMPLES), source=__file__))
    records = []
    with QuickLauncher(tmp_path) as launcher:
        for deaths in (0, 1):
            record = tmp_path / f"{deaths}.json"
            options = ["--steps", "60", "--ranks", "2", "--deaths", str(deaths), "--record", str(record)]
            code, out, err = launcher.run(2, str(script), *options, min_ranks=1, respawn=True)
            assert code == 0, err
            assert out.count("killing myself") == deaths
            records.append(json.loads(record.read_text()))
    calm, hard = records
    assert calm["sizes"] == [2] * 60
    assert len(hard["sizes"]) == 60
    assert 1 in hard["sizes"]
    assert hard["sizes"][-1] == 2, "nobody joined"
    assert calm["losses"] == pytest.approx(hard["losses"], abs=1e-4)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    lm = load("elastic_lm")
    lm.draw(calm, hard, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
