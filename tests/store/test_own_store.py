"""The store of docs/stores.md: it keeps the contract, and one registration serves all who name its scheme."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.errors import ShoalError, UsageError
from shoal.launch.cli import invoke
from shoal.launch.job.job_store import job_store
from shoal.launch.ranks.environment import Job
from shoal.rendezvous import Venue, register_rendezvous, unregister_rendezvous
from shoal.store import MemoryStore, Store, open_store
from shoal.store import urls as opener

from .conformance import StoreConformance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stores.md"
USE, MODULE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setattr(opener, "_openers", dict(opener._openers))
    module = types.ModuleType("sqlite_store")
    exec(MODULE, module.__dict__)
    return module


class TestStoreOfThePage(StoreConformance):
    largest_value = 2**20
    one_step = False

    @pytest.fixture
    def store(self, module: types.ModuleType, tmp_path: Path) -> Iterator[Store]:
        with open_store(f"sqlite://{tmp_path}/database", timeout=30) as store:
            yield store


def test_the_page_shows_how_stores_are_used() -> None:
    exec(USE, {})


SCRIPT = """
import os, sys, torch, shoal
from shoal.store import open_store
assert "sqlite_store" not in sys.modules
with shoal.init(timeout=60) as group:  # SHOAL_STORE, as `shoal run --store` sets it
    assert group.all_reduce(torch.ones(1)).wait().item() == 2.0
    rank = group.rank
url = os.environ["SHOAL_STORE"]
with shoal.init(url, rank=rank, size=2, job="other", timeout=60) as group:
    assert group.all_reduce(torch.ones(1)).wait().item() == 2.0
with open_store(url) as store:
    assert store.add("arrivals", 1) <= 2
print("met in", url)
"""


def _installed(folder: Path) -> dict[str, str]:
    """An environment in which a package with the page's module is installed."""
    (folder / "sqlite_store.py").write_text(MODULE)
    (folder / "sqlite_store-1.0.dist-info").mkdir()
    (folder / "sqlite_store-1.0.dist-info" / "METADATA").write_text("Name: sqlite-store\nVersion: 1.0\n")
    (folder / "sqlite_store-1.0.dist-info" / "entry_points.txt").write_text(
        "[shoal.stores]\nsqlite = sqlite_store\n"
    )
    paths = [str(folder), str(Path(shoal.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_one_registration_serves_init_the_environment_the_launcher_and_open_store(
    module: types.ModuleType, tmp_path: Path
) -> None:
    environ = _installed(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    url = f"sqlite://{tmp_path}/database"
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--no-prefix", "--store", url, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"met in {url}\n" * 2), done.stderr
    # The launcher has removed its job's keys; those of the job that the script named are the script's.
    with open_store(url, timeout=30) as store:
        left = {key.partition("/")[0] for key in store.list_keys()}
    assert left == {"arrivals", "other"}


def test_a_launcher_that_fails_leaves_no_keys_in_a_store_that_was_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"
    with pytest.raises(ZeroDivisionError), job_store(url, Job(2, secret="")):
        raise ZeroDivisionError
    with open_store(url, timeout=30) as store:
        assert store.list_keys() == []


def test_all_four_list_the_known_schemes_when_they_are_given_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one that an installed package brings among them."""
    _installed(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = r"etcd://, etcds://, file://, (mpi://, )?redis://, rediss://, sqlite://, tcp://$"
    with pytest.raises(UsageError, match=known):
        open_store("carrier://roof")
    with pytest.raises(UsageError, match=known):
        shoal.init("carrier://roof")
    assert invoke(["run", "--store", "carrier://roof", "true"]) == 2
    assert re.search(known, capfd.readouterr().err.strip())
    for name, value in (("STORE", "carrier://roof"), ("RANK", "0"), ("SIZE", "1")):
        monkeypatch.setenv(f"SHOAL_{name}", value)
    with pytest.raises(ShoalError, match=known):
        shoal.init()


def test_the_store_of_a_place_can_be_opened_and_the_place_is_closed_after_it() -> None:
    closed: list[bool] = []
    store = MemoryStore(30)
    register_rendezvous("place", lambda request: Venue(store, close=lambda: closed.append(True)))
    try:
        with open_store("place://here") as opened:
            assert opened is store
            assert not closed
        assert closed == [True]
        store.close()
        assert closed == [True]
    finally:
        unregister_rendezvous("place")
    with pytest.raises(UsageError, match="unknown scheme"):
        open_store("place://here")


def test_the_launcher_is_not_told_to_ask_itself(capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--store", "env://", "true"]) == 2
    assert "--store must name a store" in capfd.readouterr().err
