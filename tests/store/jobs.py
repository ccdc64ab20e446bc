"""Jobs that meet in a store on a server, by every way to name it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.rendezvous import rendezvous

from .conformance import in_background

_PYTHONPATH = str(Path(shoal.__file__).parent.parent)


def run_a_job(url: str, folder: Path) -> None:
    """Have two ranks meet by ``shoal run --store``, by ``shoal.init(url)``, and use ``open_store``.

    In the end the key "key" of the job "third" holds "value", unless that ends with its ranks.
    """
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--no-prefix", "--store", url, "script.py"]
    environ = {**os.environ, "SHOAL_SECRET": "secret", "PYTHONPATH": _PYTHONPATH}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "0", "1", "1"]), done.stderr


def meet_by_arrival(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks that know the url and the secret alone meet, where ``shoal store --store`` says how many."""
    monkeypatch.setenv("SHOAL_SECRET", "secret")
    monkeypatch.setenv("SHOAL_JOB", "by arrival")
    command = [sys.executable, "-m", "shoal", "store", "--store", url, "--size", "2"]
    environ = {**os.environ, "PYTHONPATH": _PYTHONPATH}
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == f"shoal store: {url}\n"
            with in_background() as call:
                meetings = [call(rendezvous, url, timeout=60) for _ in range(2)]
                members = [each.result(60) for each in meetings]
                assert sorted((member.rank, member.size) for member in members) == [(0, 2), (1, 2)]
                for each in [call(member.release, 30.0) for member in members]:
                    each.result(60)
            keeper.send_signal(signal.SIGTERM)
            assert keeper.wait(60) == 0
        finally:
            keeper.kill()


SCRIPT = """
import os, torch, shoal
from shoal.store import open_store
url = os.environ["SHOAL_STORE"]
with shoal.init(timeout=60) as group:
    print(group.rank)
    assert group.all_reduce(torch.ones(1)).wait().item() == 2.0
    os.environ["SHOAL_RANK"] = str(group.rank)
with shoal.init(url, rank=group.rank, size=2, job="other", timeout=60) as group:
    print(group.rank)
    group.barrier().wait()
os.environ["SHOAL_JOB"] = "third"
with open_store(url, timeout=60) as store:
    store.set("key", "value")
"""


def lose_a_rank_and_let_another_join(url: str, folder: Path) -> None:
    """Have a session of two ranks lose one, and its successor join it."""
    (folder / "script.py").write_text(SESSION)
    command = [
        sys.executable, "-m", "shoal", "run", "-n", "2", "--min", "1", "--respawn", "--no-prefix",
        "--store", url, "script.py",
    ]  # fmt: skip
    environ = {**os.environ, "SHOAL_SECRET": "secret", "PYTHONPATH": _PYTHONPATH}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:-1] == ["[2, 1, 2]"] * 2, done.stderr
    assert done.returncode == 0, done.stderr


SESSION = """
import os, signal, time
import torch
from torch import nn
from shoal.elastic import Samples, Session, State
torch.manual_seed(0)
state = State(model=nn.Linear(2, 1), optimizer=None, samples=Samples(12, batch=12), sizes=[], after=0)
with Session(state, max_size=2) as session:
    for step in session.steps():
        if state.after == 5:
            break
        with step:
            step.commit()
            if state.sizes[-1:] != [session.group.size]:
                state.sizes = [*state.sizes, session.group.size]
            state.after += state.sizes == [2, 1, 2]
        if state.sizes == [2] and session.group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
print(state.sizes, flush=True)
"""
