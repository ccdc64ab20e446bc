"""DistributedDataParallel of C++ programs: ``cpp/ddp.cc`` trains, as ``twin.py`` does, and checks errors."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

import shoal
from shoal.testing import no_leaks, run_threads
from tests.frontend import twin
from tests.frontend.test_groups import DEADLINE_S, environment, run
from tests.support.cpp_programs import build
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers = [Path(path) for path in include_paths()]
    if not any((path / "torch/nn/module.h").exists() for path in headers):
        pytest.skip("this torch has no headers for C++ programs")
    options = ["-std=c++20", "-Wl,--no-as-needed"]
    options += [word for path in headers for word in ("-isystem", str(path))]
    options += [f"{word}{path}" for path in library_paths() for word in ("-L", "-Wl,-rpath,")]
    # Not libtorch, which needs the libraries of CUDA in wheels that have them.
    options += ["-ltorch_cpu", "-lc10", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    return build("ddp.cc", tmp_path_factory.mktemp("cpp") / "ddp", options)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of additions depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs, for what the ranks have trained."""
    folder = tmp_path_factory.mktemp("twin")
    twin.write_inputs(folder, 2)
    return folder


def start(program: Path, *arguments: object, rank: int, store: str) -> subprocess.Popen[str]:
    """Start a rank without a launcher, which would end the other rank if one is killed."""
    place = {"SHOAL_STORE": store, "SHOAL_SIZE": "2", "SHOAL_RANK": str(rank), "SHOAL_PYTHON": sys.executable}
    return subprocess.Popen(
        [program, *map(str, arguments)], env=environment(**place), stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("cpp_ranks", [(0, 1), (0,), (1,)])
def test_parameters_are_bitwise_those_of_python_ranks(
    program: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, cpp_ranks: tuple[int, ...]
) -> None:
    """Also if one of the ranks is in Python; with buffers, unused parameters, a static graph, no_sync."""
    if not list(folder.glob("python-*")):
        run_threads(lambda group: twin.train(group, folder, "python"), 2)
    tag, store = f"cpp{cpp_ranks}", f"tcp://127.0.0.1:{free_port()}"
    with no_leaks():
        ranks = [start(program, "train", folder, tag, rank=rank, store=store) for rank in cpp_ranks]
        for own in {0, 1}.difference(cpp_ranks):
            for name, value in {"SHOAL_STORE": store, "SHOAL_SIZE": "2", "SHOAL_RANK": str(own)}.items():
                monkeypatch.setenv(name, value)
            with shoal.init() as group:
                twin.train(group, folder, tag)
        for rank in ranks:
            assert "train done" in rank.communicate(timeout=DEADLINE_S)[0]
    for mode in twin.MODES:
        for rank in range(2):
            ours, theirs = (folder / f"{name}-{mode}-{rank}" for name in (tag, "python"))
            assert ours.read_bytes() == theirs.read_bytes(), (mode, rank)
    trained = {(folder / f"{tag}-{mode}-0").read_bytes() for mode in twin.MODES}
    assert len(trained) == len(twin.MODES) - 1  # "whole" differs from "plain" in its buckets only


def test_misuse_is_refused_and_the_group_stays_usable(program: Path) -> None:
    """The program compares the messages."""
    with no_leaks():
        done = run(2, program, "misuse")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("misuse done") == 2


def test_a_closed_group_is_named(program: Path) -> None:
    done = run(2, program, "closed")
    assert done.returncode == 0, done.stderr
    for what in ("backward", "forward", "wrapper"):
        assert f"{what}: group 'world' on rank 1 is closed" in done.stdout


def test_a_killed_rank_is_named(program: Path) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    with no_leaks():
        ranks = [start(program, "lost", rank=rank, store=store) for rank in range(2)]
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL], outputs
    assert re.search(r"PeerLost after .* s: all_reduce .* rank 1 is lost", outputs[0])
