"""The digits example in C++, built with its CMakeLists.txt: the network of the example in Python."""

from __future__ import annotations

import copy
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.testing import run_threads
from tests.examples.load import EXAMPLES, load
from tests.support.cpp_programs import installation

EPOCHS = 2


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program, and its data beside it."""
    prefix = Path(torch.utils.cmake_prefix_path)
    if not (prefix.parents[1] / "include/torch").exists():
        pytest.skip("this torch has no headers for C++ programs")
    tools = Path(sys.executable).parent
    options = {
        "CMAKE_PREFIX_PATH": prefix,
        "shoal_DIR": installation() / "cmake",
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "CMAKE_BUILD_TYPE": "None",
    }
    given = [f"-D{name}={value}" for name, value in options.items()]
    configure = ["-G", "Ninja", "-S", EXAMPLES / "cpp", "-B", tmp_path, *given]
    for arguments in (configure, ["--build", tmp_path]):
        done = subprocess.run([tools / "cmake", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "digits"


@pytest.mark.stress  # compiling takes half a minute; CI runs it after `make test`
def test_it_trains_the_network_of_the_example_in_python(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, table = load("digits"), program.with_suffix(".csv")
    monkeypatch.setattr(sys, "argv", ["digits_csv.py", str(table)])
    runpy.run_path(str(EXAMPLES / "cpp/digits_csv.py"))
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "-n", "2", program, table, str(EPOCHS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]

    data, network = example.load(), example.make_network(seed=0)

    def rank(group: shoal.ProcessGroup) -> tuple[list[float], list[float]]:
        torch.set_num_threads(1)
        history = example.train(group, copy.deepcopy(network), data, epochs=EPOCHS, batch=32, seed=0)
        return history.loss, history.accuracy

    expected, accuracy = run_threads(rank, 2)[0]
    assert losses == pytest.approx(expected, abs=1e-4)
    right = round(accuracy[-1] * 360)
    assert f"({right} of 360 digits) after {EPOCHS} epochs on 2 ranks" in done.stdout
