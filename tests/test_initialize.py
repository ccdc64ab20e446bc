"""shoal.init, from the meeting to the end of the process."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.backend.registry import unregister_backend
from shoal.initialize import default_url
from shoal.testing import no_leaks, run_threads
from tests.rendezvous.together import together
from tests.support.stage import Ended, Stage
from tests.support.store_backend import StoreBackend

ROOT = Path(__file__).resolve().parent.parent


def test_a_group_of_one_needs_nothing(store_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SHOAL_", "SLURM_", "OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    with no_leaks(), shoal.init(backend=store_backend) as group:
        assert (group.rank, group.size, group.name, group.ranks) == (0, 1, "world", (0,))
        assert group.all_reduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]


def test_the_backend_comes_from_the_argument_or_the_environment(
    store_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_BACKEND", store_backend)
    with shoal.init() as group, shoal.init(job="other", backend="native") as other:
        assert [type(each._backend).name for each in (group, other)] == ["store", "native"]
    with pytest.raises(shoal.UsageError, match=r"shoal\.init \(backend 'store'\) .* no argument 'transport'"):
        shoal.init(transport="tcp")


class FileBackend(StoreBackend):
    """Its ranks meet in a file, if no store is named."""

    default_url: ClassVar[str | None] = None


def test_a_backend_names_the_place_to_meet_if_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileBackend, "default_url", f"file://{tmp_path}/meet")
    shoal.register_backend("file", FileBackend)
    try:

        def rank(number: int) -> float:
            with shoal.init(rank=number, size=2, backend="file", timeout=20) as group:
                return group.all_reduce(torch.tensor([float(number + 1)])).wait().item()

        assert together(lambda: rank(0), lambda: rank(1)) == [3.0, 3.0]
        with shoal.init("env://", backend="file") as group:
            assert group.size == 1
        for variables in ({"SHOAL_STORE": "file:///x"}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}):
            with monkeypatch.context() as patch:
                for name, text in variables.items():
                    patch.setenv(name, text)
                assert default_url(FileBackend) is None
        monkeypatch.setenv("MASTER_ADDR", "a")
        assert default_url(FileBackend) == FileBackend.default_url
        assert default_url(StoreBackend) is None
    finally:
        unregister_backend("file")


def test_two_ranks_meet_and_talk(store_backend: str, tmp_path: Path) -> None:
    def rank(number: int) -> float:
        url = f"file://{tmp_path}/meet"
        with shoal.init(url, rank=number, size=2, backend=store_backend, timeout=20, name="pair") as group:
            assert group.timeout == 20
            assert group.name == "pair"
            return group.all_reduce(torch.tensor([float(number + 1)])).wait().item()

    with no_leaks():
        assert together(lambda: rank(0), lambda: rank(1)) == [3.0, 3.0]


@pytest.mark.parametrize("kind", [shoal.MemoryStore, dist.HashStore])
def test_ranks_meet_in_a_store_that_stays_the_callers(kind: Callable[[], Any], store_backend: str) -> None:
    given = kind()

    def rank(**who: int) -> float:
        with shoal.init(store=given, backend=store_backend, timeout=20, **who) as group:
            return group.all_reduce(torch.tensor([1.0])).wait().item()

    with no_leaks():
        assert together(lambda: rank(rank=1, size=2), lambda: rank(rank=0, size=2)) == [2.0, 2.0]
        assert together(lambda: rank(size=2), lambda: rank()) == [2.0, 2.0]  # as they arrive
        given.set("still", b"open")
        view = shoal.PrefixStore("another/place", given)
        assert not view.check(["still"])
        with shoal.init(store=view, rank=0, size=1, backend=store_backend):
            assert view.num_keys() > 0


def test_closing_the_group_closes_the_backend_and_leaves_the_meeting(store_backend: str) -> None:
    def fn(group: shoal.ProcessGroup) -> tuple[StoreBackend, shoal.Store]:
        return group._backend, group.store  # type: ignore[return-value]

    for backend, store in run_threads(fn, 2, backend=store_backend):
        assert backend.closed
        with pytest.raises(shoal.StoreError, match="closed"):
            store.check(["x"])


def test_options_go_to_the_backend_which_refuses_what_it_does_not_know(store_backend: str) -> None:
    with no_leaks():
        shoal.init(backend=store_backend, color="blue").close()
        with pytest.raises(TypeError, match="colour"):
            shoal.init(backend=store_backend, colour="blue")


def test_a_backend_that_fails_leaves_the_meeting_in_order(store_backend: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"

    def rank(number: int, **options: Any) -> None:
        shoal.init(url, rank=number, size=2, backend=store_backend, timeout=20, **options).close()

    with no_leaks():
        for error in together(lambda: rank(0, bad=1), lambda: rank(1, bad=1)):
            assert isinstance(error, TypeError)
        assert together(lambda: rank(0), lambda: rank(1)) == [None, None]


def test_bad_arguments_are_refused_before_anybody_waits() -> None:
    with pytest.raises(shoal.UsageError, match="unknown backend 'nativ'; known backends: "):
        shoal.init("tcp://127.0.0.1:1", rank=0, size=2, backend="nativ")
    with pytest.raises(shoal.UsageError, match="concurrency=0: expected a whole number from 1"):
        shoal.init("tcp://127.0.0.1:1", rank=0, size=2, concurrency=0)
    with pytest.raises(shoal.UsageError, match="rank=2: expected a whole number from 0 to 1"):
        shoal.init("tcp://127.0.0.1:1", rank=2, size=2)
    with pytest.raises(shoal.UsageError, match="url='env://' and store=: expected one place"):
        shoal.init("env://", store=shoal.MemoryStore())
    with pytest.raises(shoal.UsageError, match=r"expected a shoal.store.Store or a torch"):
        shoal.init(store="tcp://127.0.0.1:1", rank=0, size=2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"timeout": 0}, "timeout=0: expected a positive number of seconds"),
        ({"timeout": True}, "timeout=True: expected"),
        ({"timeout": datetime.timedelta(1)}, "expected a positive number of seconds; pass its total_seconds"),
        ({"transport": "ib"}, "transport='ib': expected one of auto, shm, tcp"),
        ({"heartbeat_timeout": -1}, "heartbeat_timeout=-1: expected a positive number of seconds"),
        ({"shared_memory_limit": "1G"}, "shared_memory_limit='1G': expected a number of bytes"),
        ({"name": 3}, "name=3: expected a str"),
        ({"host_id": ""}, "host_id='': expected a str that is not empty"),
        ({"rank": True}, "rank=True: expected a whole number"),
        ({"size": True}, "size=True: expected a whole number"),
        ({"concurrency": True}, "concurrency=True: expected a whole number"),
        ({"backend": "gloo"}, "replaces torch's gloo: omit backend="),
        ({"concurency": 2}, r"shoal\.init .* no argument 'concurency' \(did you mean 'concurrency'\?\)"),
        ({"transprt": "tcp"}, r"shoal\.init .* no argument 'transprt' \(did you mean 'transport'\?\)"),
        ({"world_size": 2}, r"no argument 'world_size' \(did you mean 'size'\?\)"),
        ({"init_method": "env://"}, r"no argument 'init_method' \(did you mean 'url'\?\)"),
        ({"xyzzy": 2}, r"no argument 'xyzzy'\.  It takes url, store, rank, .*, transport, "),
    ],
)
def test_every_argument_is_checked_in_a_group_of_one_too(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(shoal.UsageError, match=problem):
        shoal.init(**arguments)


@pytest.mark.parametrize("backend", ["native", "store"])
def test_every_variable_is_checked_in_a_group_of_one_too(
    backend: str, store_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("SHOAL_TRANSPORT", "udp"), ("SHOAL_LOCAL_SIZE", "0"), ("SHOAL_TIMEOUT", "soon")):
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            with pytest.raises(shoal.ConfigurationError, match=f"{name}='{text}': expected"):
                shoal.init(backend=backend)


def test_a_variable_that_means_nothing_is_a_warning_once(
    store_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.config, "_warned", set())
    monkeypatch.setenv("SHOAL_TRANPORT", "tcp")
    monkeypatch.setenv("SHOAL_QQQ", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            shoal.init(backend=store_backend).close()
    caught = [warning for warning in caught if warning.category is UserWarning]  # others may be of garbage
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert texts[0].startswith("the environment variable SHOAL_QQQ is unknown to shoal and is ignored")
    assert "the known variables are SHOAL_RANK, SHOAL_SIZE, " in texts[0]
    assert texts[1].endswith("did you mean SHOAL_TRANSPORT?")
    assert caught[0].filename == __file__


def test_lanes_come_from_the_argument_or_the_environment(
    store_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CONCURRENCY", "3")
    with shoal.init(backend=store_backend) as group:
        assert group._spec.tuning.concurrency == 3
    with shoal.init(backend=store_backend, concurrency=2) as group:
        assert group._spec.tuning.concurrency == 2


_PROGRAM = """
import sys
import shoal
from tests.support.store_backend import StoreBackend, StoreChannel

class Talkative(StoreBackend):
    def close(self, timeout):
        print("backend closed", flush=True)

StoreChannel.abort = lambda self, reason: print("aborted:", reason, flush=True)
shoal.backend.registry.register_backend("store", Talkative)
group = shoal.init(backend="store")
{then}
"""


def _run(then: str, folder: Path, *, forks: bool = False) -> Ended:
    """Run the program; a fork of one that forks waits for ever for the thread of its stacks."""
    with contextlib.closing(Stage(folder)) as stage:
        script = stage.script(_PROGRAM.format(then=then), prelude="")
        if forks:
            return stage.run(script, PYTHONPATH=f"{stage.environment['PYTHONPATH']}:{ROOT}")
        (ended,) = stage.ranks(script, 1, lambda rank, size, port: {})
        return ended


def test_what_is_open_at_exit_is_closed(tmp_path: Path) -> None:
    result = _run("pass", tmp_path)
    assert (result.code, result.out) == (0, "backend closed\n"), result.err


def test_an_uncaught_exception_is_told_to_the_others(tmp_path: Path) -> None:
    result = _run("raise KeyError('a bad day')", tmp_path)
    assert result.code == 1
    assert result.out == "aborted: rank 0 ended with KeyError: 'a bad day'\nbackend closed\n"


def test_a_forked_child_closes_nothing_of_its_parents(tmp_path: Path) -> None:
    then = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0); print('parent', flush=True)"
    result = _run(then, tmp_path, forks=True)
    assert (result.code, result.out) == (0, "parent\nbackend closed\n"), result.err


def test_a_rank_that_is_killed_leaves_no_trouble_for_the_next_job(tmp_path: Path, store_backend: str) -> None:
    url = f"file://{tmp_path}/meet"
    program = (
        "import os, signal, sys; from shoal.rendezvous import rendezvous\n"
        "rendezvous(sys.argv[1], rank=0, size=1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, url], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with shoal.init(url, rank=0, size=1, backend=store_backend) as group:
        assert group.size == 1
