"""The language model: the same on any number of ranks, and a killed run goes on as if it had not been."""

from __future__ import annotations

import shutil
import signal
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import shoal
from shoal.testing import run_threads
from tests.examples.load import EXAMPLES, load
from tests.support.quick_launcher import QuickLauncher

TINY = {"batch": 6, "context": 16, "width": 16, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def lm() -> ModuleType:
    return load("bytes_lm")


@pytest.fixture(scope="module")
def text(lm: ModuleType) -> Any:
    """This test's own source, for training and for validation."""
    source = Path(__file__).read_bytes()
    return lm.Text.of(source[1000:], source[:1000])


def _train(
    lm: ModuleType,
    text: Any,
    ranks: int,
    checkpoint: Path,
    *,
    steps: int = 6,
    accumulate: int = 1,
    every: int = 1000,
    resume: bool = False,
) -> Any:
    """The history of a run on ``ranks`` threads, which must end with equal networks."""

    def rank(group: shoal.ProcessGroup) -> Any:
        torch.set_num_threads(1)
        training = lm.Training(group, text, lm.Settings(steps=steps, **TINY))
        if resume:
            training.resume(checkpoint)
        quiet = Progress(disable=True, console=Console(quiet=True))
        lm.train(training, checkpoint, accumulate=accumulate, checkpoint_every=every, progress=quiet)
        return training

    first, *others = run_threads(rank, ranks)
    for other in others:
        assert other.history == first.history
        for mine, its in zip(first.network.parameters(), other.network.parameters(), strict=True):
            assert torch.equal(mine, its)
    return first.history


def _load(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True)


def _assert_same_run(a: Path, b: Path) -> None:
    """Everything in two checkpoints is equal, bit for bit."""
    one, two = _load(a), _load(b)
    assert one["history"] == two["history"]
    for name, value in one["network"].items():
        assert torch.equal(value, two["network"][name]), name
    for number, moments in one["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, two["optimizer"]["state"][number][name]), (number, name)
    assert one["schedule"] == two["schedule"]


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
def test_2_and_4_ranks_lose_as_much_as_1_with_the_same_batch(
    lm: ModuleType, text: Any, tmp_path: Path
) -> None:
    """A batch of 6 windows: the parts of 4 ranks differ in size, and so do the pieces of each part.

    In double precision, where what remains of rounding tells it from a mistake.
    """
    alone = _train(lm, text, 1, tmp_path / "alone.pt", steps=20)
    assert alone.train[-1] < alone.train[0]
    for ranks, accumulate in ((1, 4), (2, 1), (2, 2), (4, 1), (4, 2)):
        together = _train(lm, text, ranks, tmp_path / "together.pt", steps=20, accumulate=accumulate)
        assert together.train == pytest.approx(alone.train, rel=1e-11)
        assert dict(together.validation) == pytest.approx(dict(alone.validation), rel=1e-11)


def _keep_step(lm: ModuleType, patch: pytest.MonkeyPatch, step: int, copy: Path) -> None:
    """From now on the checkpoint that is written after ``step`` is also copied."""
    save = lm.Training.save

    def save_and_copy(training: Any, path: Path) -> None:
        save(training, path)
        if training.done == step:
            shutil.copy(path, copy)

    patch.setattr(lm.Training, "save", save_and_copy)


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_never_interrupted(
    lm: ModuleType, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = tmp_path / "whole.pt", tmp_path / "resumed.pt"
    _keep_step(lm, monkeypatch, 3, resumed)
    _train(lm, text, 2, whole, every=3)
    assert len(_load(resumed)["history"]["train"]) == 3
    _train(lm, text, 2, resumed, resume=True)
    _assert_same_run(whole, resumed)


def test_a_run_of_2_ranks_is_resumed_by_1_or_3(
    lm: ModuleType, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "half.pt"
    _keep_step(lm, monkeypatch, 3, half)
    whole = _train(lm, text, 2, tmp_path / "whole.pt", every=3)
    for ranks in (1, 3):
        resumed = Path(shutil.copy(half, tmp_path / "resumed.pt"))
        history = _train(lm, text, ranks, resumed, resume=True)
        assert history.train[:3] == whole.train[:3]
        assert history.train == pytest.approx(whole.train, rel=1e-5)


def test_a_write_that_fails_halfway_leaves_the_checkpoint_before(
    lm: ModuleType, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "lm.pt"
    _train(lm, text, 1, checkpoint)
    before = checkpoint.read_bytes()

    def write_half(state: object, file: Any) -> None:
        file.write(before[: len(before) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(shoal.RemoteError, match="no space left"):
        _train(lm, text, 1, checkpoint)
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_resumed_is_said(lm: ModuleType, text: Any, tmp_path: Path, ranks: int) -> None:
    checkpoint = tmp_path / "lm.pt"

    def refusal(text: Any, **settings: int) -> list[str]:
        def rank(group: shoal.ProcessGroup) -> str:
            training = lm.Training(group, text, lm.Settings(**{**TINY, **settings}))
            with pytest.raises(SystemExit) as caught:
                training.resume(checkpoint)
            return str(caught.value)

        return run_threads(rank, ranks)

    assert refusal(text) == [f"there is no checkpoint {checkpoint} to resume from"] * ranks
    _train(lm, text, ranks, checkpoint)
    other = refusal(text, steps=6, width=32)
    assert other == [f"{checkpoint} is of a run with --width 16, this is 32"] * ranks
    (message,) = set(refusal(lm.Text.of(b"another" * 9, b"text" * 9), steps=6))
    assert "another text" in message


def test_the_text_is_the_library_without_tests_and_packages(
    lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(name: str, content: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for number in range(100):
        add(f"part{number % 3}/module{number:02}.py", f"<{number}>")
    train, validation = lm.read_library()
    assert sorted((train + validation).decode().strip("<>").split("><"), key=int) == [*map(str, range(100))]
    assert 1 <= validation.count(b"<") <= 15

    for name in ("test/a.py", "json/tests/b.py", "site-packages/c.py", "data.txt"):
        add(name, "left out")
    add("part0/aaa.py", "<new>")  # it moves no other file from one part to the other
    assert [part.replace(b"<new>", b"") for part in lm.read_library()] == [train, validation]

    monkeypatch.setattr(lm, "TEXT_BYTES", 50)
    assert sum(map(len, lm.read_library())) == 50


#: The example, whose rank 0 is killed in a step after which there would be no checkpoint.
KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import bytes_lm

step = bytes_lm.Training.step

def step_or_die(training, accumulate):
    if training.group.rank == 0 and training.done == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    step(training, accumulate)

bytes_lm.Training.step = step_or_die
bytes_lm.main()
"""


def test_a_run_whose_rank_0_is_killed_goes_on_as_if_it_had_not(
    lm: ModuleType, launcher: QuickLauncher, tmp_path: Path
) -> None:
    settings = lm.Settings(steps=60, **TINY)
    given = [f"--{name}={value}" for name, value in asdict(settings).items()]
    options = [*given, "--checkpoint-every=2", f"--out={tmp_path}"]
    killed = tmp_path / "killed.py"
    killed.write_text(KILLED.format(folder=str(EXAMPLES)))
    checkpoint = tmp_path / "bytes_lm.pt"

    code, out, err = launcher.run(2, str(killed), *options)
    assert code == 128 + signal.SIGKILL, out + err
    assert "rank 0 failed first" in err
    assert len(_load(checkpoint)["history"]["train"]) == 30

    code, out, err = launcher.run(2, str(EXAMPLES / "bytes_lm.py"), *options, "--resume")
    assert code == 0, out + err
    assert "validation perplexity" in out
    assert out.count("[0] def ") == 2
    assert (tmp_path / "bytes_lm.png").read_bytes().startswith(b"\x89PNG")

    _train(lm, lm.Text.of(*lm.read_library()), 2, tmp_path / "whole.pt", steps=settings.steps)
    _assert_same_run(checkpoint, tmp_path / "whole.pt")
