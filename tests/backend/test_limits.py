"""What the system refuses is an error of ours that says what to do, and leaves nothing open."""

from __future__ import annotations

import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.backend.native import mesh
from shoal.errors import RemoteError
from shoal.group import ProcessGroup
from shoal.testing import no_leaks, run_threads
from tests.support.programs import run_program

_HEAD = """
import os, resource, sys
import torch
import shoal
from shoal.errors import OutOfResources, OutOfSharedMemory, RemoteError, ShoalError
from shoal.testing import run_threads

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def limited(kind, value):
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

def refused():
    before = descriptors()
    try:
        shoal.init(rank=0, size=1)
    except ShoalError as error:
        assert descriptors() == before, (before, descriptors())  # though the error still has its traceback
        return error
    raise AssertionError("it was not refused")

"""


def run(folder: Path, script: str) -> None:
    (folder / "limited.py").write_text(_HEAD + textwrap.dedent(script))
    run_program(folder / "limited.py", 1, folder=folder)


def test_too_little_address_space_is_named(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        used = 1024 * int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1])
        limited(resource.RLIMIT_AS, used + 2**29)
        error = refused()
        assert isinstance(error, OutOfSharedMemory), error
        assert "rank 0 cannot start (reserving" in str(error), error
        assert "cannot map shared memory: Cannot allocate memory" in str(error), error
        assert "ulimit -v" in str(error), error
    """,
    )


def test_a_small_limit_on_files_is_named(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        limited(resource.RLIMIT_FSIZE, 2**20)
        error = refused()
        assert isinstance(error, OutOfSharedMemory), error
        assert "cannot reserve shared memory: File too large" in str(error), error
        assert "ulimit -f" in str(error), error
    """,
    )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_wherever_descriptors_run_out_it_is_said_and_none_stays_open(transport: str, tmp_path: Path) -> None:
    run(
        tmp_path,
        f"""
        def sums(group):
            return group.all_reduce(torch.ones(1)).wait().item()

        assert run_threads(sums, 3, transport="{transport}") == [3.0] * 3
        before = descriptors()
        refusals = 0
        for more in (9, 21, 33, 70):
            limited(resource.RLIMIT_NOFILE, before + more)
            patience = 3 if more < 70 else 60  # 70 are enough
            try:
                assert run_threads(sums, 3, transport="{transport}", timeout=patience) == [3.0] * 3
                break
            except RemoteError as error:
                refusals += "OutOfResources" in str(error)
                text = str(error)
            except OSError as error:
                text = repr(error)
            finally:
                limited(resource.RLIMIT_NOFILE, before + 500)
            assert descriptors() == before, (more, before, descriptors(), text)
        else:
            raise AssertionError(text)
        assert refusals > 0
    """,
    )


class _OneMoreThread(threading.Thread):
    """A thread of a process that may have one more."""

    left = 1

    def start(self) -> None:
        if type(self).left == 0:
            raise RuntimeError("can't start new thread")
        type(self).left -= 1
        super().start()


@pytest.mark.parametrize("left", [0, 1])
def test_where_threads_run_out_it_is_said_and_no_connection_stays_open(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(group: ProcessGroup) -> None:
        raise AssertionError("no group can be made")

    with no_leaks(), monkeypatch.context() as patched:
        patched.setattr(_OneMoreThread, "left", left)
        patched.setattr(mesh, "threading", SimpleNamespace(Thread=_OneMoreThread, Lock=threading.Lock))
        with pytest.raises(
            RemoteError, match=r"OutOfResources: rank . cannot start .*can't start new thread"
        ):
            run_threads(fn, 2, timeout=20)
