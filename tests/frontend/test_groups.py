"""Groups and futures of C++ programs: ``cpp/groups.cc`` has the tests, which run here with several ranks."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from shoal.errors import LaunchError
from shoal.launch.cli import invoke
from shoal.launch.ranks.guardian import Guardian
from shoal.launch.ranks.process import LocalRank
from shoal.testing import no_leaks
from shoal.tracing import spool
from tests.support.chrome_traces import ChromeTrace
from tests.support.cpp_programs import COMPILER, SOURCES, build, compilers, installation
from tests.support.ports import free_port
from tests.support.waiting import until

DEADLINE_S = 120.0

#: the Python rank of ``beside_python``
PYTHON_RANK = """
import pytest, torch, shoal
with shoal.init() as group:
    x = torch.full((100,), 3.0)
    group.all_reduce(x).wait()
    assert x[0] == 5
    chained = group.all_reduce(x).then(lambda done: group.all_reduce(done.wait()).wait()[0].item())
    assert chained.wait() == 20
    half = group.split(0, -group.rank)
    y = torch.full((3,), half.rank)
    half.broadcast(y, 0).wait()
    assert y[0] == 0
    with pytest.raises(shoal.UsageError, match="asked for different groups"):
        group.split(1, concurrency=2)
    peer = 1 - group.rank
    group.send(torch.full((10, 10), 42.0), peer, 1).wait()
    assert group.recv(None, peer, 2).wait()[99] == 42
    half.close()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("groups.cc", tmp_path_factory.mktemp("cpp") / "groups", ["-std=c++17"])


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    return {**kept, **variables}


def run(size: int, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", "run", "-n", str(size), *map(str, command)],
        env=environment(**variables), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("collectives", 1), ("collectives", 3), ("messages", 3), ("futures", 3), ("split", 4), ("errors", 2),
        ("timeout", 2), ("abort", 2), ("exception", 2), ("exits", 2), ("forks", 2), ("again", 2),
        ("arguments", 2), ("last_handle", 2), ("exits_in_callback", 2), ("reaps", 2),
    ],
)  # fmt: skip
def test_a_program_of_several_ranks(program: Path, name: str, size: int) -> None:
    with no_leaks():
        done = run(size, program, name)
    assert (done.returncode, done.stderr) == (0, "")


def test_random_rounds_of_threads_with_callbacks(program: Path) -> None:
    """``make sanitize`` runs it under the sanitizers."""
    with no_leaks():
        done = run(3, program, "random_rounds", os.environ.get("CPP_SECONDS", "1"))
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_of_two_hosts_are_connected_by_sockets(program: Path) -> None:
    command = f'SHOAL_HOST_ID=host$((SHOAL_RANK / 2)) exec {program} "$0"'
    for name in ("collectives", "messages"):
        done = run(4, "sh", "-c", command, name)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_summary_of_a_job_has_cpp_ranks(program: Path) -> None:
    done = run(3, "--summary", program, "collectives")
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    rows = [line.split() for line in lines if line.startswith("shoal:  ") and line.split()[1].isdigit()]
    assert [row[1] for row in rows] == ["0", "1", "2"]
    assert len({row[2] for row in rows}) == 1
    assert int(rows[0][2]) > 10
    assert not any("no summary" in line for line in lines)


def test_a_python_rank_works_beside_a_cpp_rank(program: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(PYTHON_RANK)
    for cpp_rank in (0, 1):
        command = (
            f"if [ $SHOAL_RANK = {cpp_rank} ]; then exec {program} beside_python; "
            f"else exec {sys.executable} {script}; fi"
        )
        done = run(2, "sh", "-c", command)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["collectives", "again"])
def test_the_launcher_runs_the_rendezvous_of_programs_without_python(program: Path, name: str) -> None:
    with no_leaks():
        done = run(2, "--connect", program, name, SHOAL_PYTHON="/nowhere/python")
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_left_if_the_launcher_cannot_start_a_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("shoal.launch.ranks.process.RankHelper", fail)
    with no_leaks(), Guardian() as guardian, pytest.raises(LaunchError, match="Too many open files"):
        LocalRank(
            0, 0, 0, 1, ["true"], {"SHOAL_CONNECT": "1"}, guardian=guardian, cores=None, fork_server=None,
            stdin=None, threaded=True, newcomer=False,
        )  # fmt: skip


def test_the_launcher_names_the_killed_rank_and_returns_its_code(program: Path) -> None:
    with no_leaks():
        done = run(3, program, "killed")
    assert done.returncode == 128 + signal.SIGKILL
    assert "shoal: rank 2 failed first: killed by SIGKILL" in done.stderr


def test_the_launcher_names_the_rank_that_aborted_and_ended_last(program: Path) -> None:
    done = run(3, program, "ends_late")
    assert done.returncode == 9
    assert "shoal: rank 2 failed first: exit code 9" in done.stderr


def test_programs_are_traced_and_the_trace_of_a_killed_one_is_merged(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    with no_leaks():
        done = run(3, program, "traced", SHOAL_TRACE=str(folder))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert sorted(path.name.split("-")[2] for path in folder.glob("*.trace.json")) == ["0", "1"]
    (left,) = folder.glob("*-2-*.trace.spool")
    for path in folder.glob("*.trace.json"):
        trace = ChromeTrace(path)
        names = [each["name"] for each in trace.slices("collective")]
        assert names == ["barrier", *["all_reduce"] * 3, "all_gather", "barrier", "barrier"]
        late = [each for each in trace.slices("wait") if each["name"] == "wait for rank 1"]
        assert path.name.split("-")[2] == "1" or sum(each["dur"] for each in late) > 50_000
        groups = [group["name"] for group in trace.other["groups"]]
        assert len(groups) == 2
    assert len(list(spool.read_spool(left).records())) == 7
    assert invoke(["trace", "merge", str(folder), "-o", str(tmp_path / "merged.json")]) == 0
    printed = capsys.readouterr().out
    assert "3 ranks, 21 operations" in printed
    assert "\nrank 1 was waited for " in printed


def test_a_trace_that_cannot_be_created_or_written_is_named(program: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(2, program, "traced", SHOAL_TRACE=str(tmp_path / "file"))
    assert "ConfigurationError" in done.stderr
    assert "files cannot be created there: File exists; name a directory" in done.stderr


def test_the_digest_is_that_of_python(program: Path) -> None:
    lines = subprocess.run([program, "digests"], capture_output=True, text=True, check=True).stdout.split()
    counts = (0, 1, 127, 128, 129, 1000)
    assert lines == [hashlib.blake2b(b"x" * count, digest_size=32).hexdigest() for count in counts]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"SHOAL_PYTHON": "/nowhere/python"}, "cannot start '/nowhere/python' for the rendezvous: No such"),
        ({"SHOAL_PYTHON": "false"}, "ended with exit code 1; is shoal installed in that Python?"),
        ({"SHOAL_PYTHON": sys.executable, "SHOAL_TIMEOUT": "0"}, "SHOAL_TIMEOUT"),
        ({"SHOAL_PYTHON": sys.executable, "SHOAL_BACKEND": "mpi"}, "C++ programs use the native backend"),
    ],
)  # fmt: skip
def test_a_failed_start_says_what_to_do(program: Path, variables: dict[str, str], text: str) -> None:
    done = subprocess.run(
        [program, "fails_to_join"], env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert text in done.stdout


@pytest.mark.parametrize("limit", [4, 8, 12])
def test_a_lack_of_descriptors_is_named(program: Path, limit: int) -> None:
    done = run(2, "sh", "-c", f"ulimit -n {limit}; exec {program} fails_to_join")
    assert (done.returncode, "ulimit -n" in done.stdout) == (3, True), done


def test_every_rank_gets_the_error_of_a_rendezvous(program: Path) -> None:
    command = f"SHOAL_SIZE=$((SHOAL_RANK + 2)) exec {program} fails_to_join"
    done = run(2, "sh", "-c", command)
    assert done.returncode == 3
    assert "size" in done.stdout


@pytest.fixture
def pair(program: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks without a launcher, which wait for each other in a loop; rank 0 serves the store."""
    base = environment(
        SHOAL_STORE=f"tcp://127.0.0.1:{free_port()}", SHOAL_SIZE="2", SHOAL_PYTHON=sys.executable
    )
    ranks = [
        subprocess.Popen(
            [program, "count_loop"], env={**base, "SHOAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_is_left_of_a_killed_rank(pair: list[subprocess.Popen[str]], victim: int) -> None:
    (helper,) = psutil.Process(pair[victim].pid).children()
    pair[victim].send_signal(signal.SIGKILL)
    _, errors = pair[1 - victim].communicate(timeout=DEADLINE_S)
    assert f"rank {victim} is lost" in errors
    assert "shoal::frontend::PeerLost" in errors
    until(lambda: not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.stress  # the others wait a minute for a stopped rank
def test_a_stopped_rank_is_named(pair: list[subprocess.Popen[str]]) -> None:
    """The peers observe the program, not the helper, which connected."""
    pair[1].send_signal(signal.SIGSTOP)
    _, errors = pair[0].communicate(timeout=DEADLINE_S)
    assert "rank 1 is lost: its process is stopped" in errors


def test_a_group_outlives_its_helpers(pair: list[subprocess.Popen[str]]) -> None:
    for rank in pair:
        for helper in psutil.Process(rank.pid).children():
            helper.kill()
    pair[0].send_signal(signal.SIGKILL)
    _, errors = pair[1].communicate(timeout=DEADLINE_S)
    assert "rank 0 is lost" in errors


@pytest.mark.parametrize(
    ("compiler", "standard"), [*((each, "c++17") for each in compilers()), (COMPILER, "c++20")]
)
def test_the_headers_compile(compiler: str, standard: str) -> None:
    options = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-fsyntax-only"]
    include = f"-I{installation() / 'include'}"
    subprocess.run([compiler, f"-std={standard}", *options, include, SOURCES / "groups.cc"], check=True)
