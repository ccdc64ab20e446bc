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
