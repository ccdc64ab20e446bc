"""The parameter server: a trainer dies and is replaced, the network learns, and nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest

from shoal.testing import no_leaks
from shoal.testing.processes import fork_server
from tests.examples.load import EXAMPLES


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as a module that its workers find under its name, with a fork server that is warm."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import parameter_server

    monkeypatch.setattr(parameter_server, "FORK_SERVER", fork_server())
    yield parameter_server
    del sys.modules["parameter_server"]


def _check(out: str, updates: int, accuracy: float) -> None:
    """What it printed: the death, the replacement, and the end."""
    assert re.search(r"after \d+ updates: worker 'chief': .*train at 'trainer1': the worker .* was lost", out)
    assert f"trainer1 goes on after {updates // 2} of its updates as process" in out
    last = re.search(r"test accuracy ([\d.]+) % \(\d+ of 360 digits\) after (\d+) updates", out)
    assert last is not None, out
    assert float(last[1]) >= accuracy
    assert int(last[2]) == 3 * updates


def test_a_trainer_dies_and_a_new_process_takes_its_place(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["parameter_server.py", "--updates", "32"])
    with no_leaks():
        example.main()
    _check(capsys.readouterr().out, 32, 50)


@pytest.mark.stress
def test_the_command_reaches_97_percent_and_leaves_no_process() -> None:
    mark = str(uuid.uuid4())
    command = [sys.executable, str(EXAMPLES / "parameter_server.py")]
    run = subprocess.run(
        command, env=os.environ | {"MARK_OF_THE_TEST": mark}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert [process for process in psutil.process_iter() if _environment(process) == mark] == []
    _check(run.stdout, 360, 97)


def _environment(process: psutil.Process) -> str | None:
    """What the mark of the test is there; the children of a process have its environment."""
    try:
        return process.environ().get("MARK_OF_THE_TEST")
    except psutil.Error:
        return None
