"""Another number of processes for a job that runs: ``shoal run --max`` and ``shoal scale``."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.ranks.slots import plan_scale
from tests.support.waiting import until

from .conftest import Workshop
from .test_respawn import PRELUDE, said

#: processes join at once, and leave in good order; those in slots 1 and 2 are killed by SIGTERM
SCRIPT = """
def leave(number, frame):
    sys.exit(0)
if slot not in "12":
    signal.signal(signal.SIGTERM, leave)
if joins:
    join()
    print(os.environ["SHOAL_LOCAL_SIZE"], flush=True)
tell("ready" + slot)
await_file("go")
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No job but those of the test, in a directory whose path is longer than addresses of sockets may be."""
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))


def start(workshop: Workshop, *options: str, script: str = SCRIPT) -> subprocess.Popen[bytes]:
    (workshop.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    return workshop.shoal("run", *options, "script.py")


def scale(workshop: Workshop, *arguments: str) -> tuple[int, str]:
    code, out, err = workshop.end(workshop.shoal("scale", *arguments))
    return code, (out + err).decode()


def test_a_job_gets_more_processes_and_fewer(workshop: Workshop) -> None:
    job = start(workshop, "-n", "2", "--min", "1", "--max", "4", "--log-dir", "logs")
    workshop.read("ready0"), workshop.read("ready1")
    assert scale(workshop, "4") == (0, "shoal: 4 ranks wanted: ranks 2, 3 start\n")
    workshop.read("ready2"), workshop.read("ready3")
    assert scale(workshop, "4") == (0, "shoal: 4 ranks wanted: no change\n")
    assert scale(workshop, "1") == (0, "shoal: 1 rank wanted: ranks 1-3 leave\n")
    told = ""
    for _ in range(3):
        told += said(job, " has left, after")
    assert sorted(line.split()[2] for line in told.splitlines() if "has left" in line) == ["1", "2", "3"]
    (workshop.path / "ready1").unlink()
    assert scale(workshop, "2") == (0, "shoal: 2 ranks wanted: rank 1 starts\n")
    workshop.read("ready1")
    assert scale(workshop, "5") == (2, "shoal: 5: the job runs with --min 1 --max 4\n")
    (workshop.path / "go").touch()
    code, out, err = workshop.end(job)
    assert (code, err) == (0, b"shoal: 2 ranks wanted: rank 1 starts\n")
    assert sorted(out.splitlines()) == [b"[1.1] 4", b"[2] 4", b"[3] 4"]
    assert (workshop.path / "logs" / "rank3.log").read_text() == "4\n"


def test_more_processes_wait_until_others_have_left(workshop: Workshop) -> None:
    script = SCRIPT.replace("sys.exit(0)", "await_file('leave' + slot); sys.exit(0)")
    job = start(workshop, "-n", "2", "--min", "1", "--max", "4", script=script.replace('"12"', '"-"'))
    workshop.read("ready0"), workshop.read("ready1")
    scale(workshop, "4")
    workshop.read("ready2"), workshop.read("ready3")  # those that have not joined would leave first
    assert scale(workshop, "3") == (0, "shoal: 3 ranks wanted: rank 3 leaves\n")
    assert scale(workshop, "4") == (0, "shoal: 4 ranks wanted: 1 more when others have left\n")
    (workshop.path / "ready3").unlink()
    (workshop.path / "leave3").touch()
    workshop.read("ready3")
    (workshop.path / "go").touch()
    code, out, _ = workshop.end(job)
    assert code == 0
    assert b"[3.1] 4" in out


def test_those_that_left_are_not_counted_as_finished(workshop: Workshop) -> None:
    script = SCRIPT.replace('"12"', '"-"') + "sys.exit(7)"
    job = start(workshop, "-n", "2", "--min", "1", "--max", "2", script=script)
    workshop.read("ready0"), workshop.read("ready1")
    scale(workshop, "1")
    said(job, "rank 1 has left")
    (workshop.path / "go").touch()
    code, _, err = workshop.end(job)
    assert code == 7
    assert b"rank 0 failed first: exit code 7" in err


def test_a_job_must_be_named_if_there_are_several(workshop: Workshop) -> None:
    none = (2, "shoal: no job of shoal run --max of this user runs on this machine\n")
    assert scale(workshop, "2") == none
    options = ("-n", "1", "--min", "1", "--max", "2")
    jobs = []
    for _ in range(2):
        jobs.append(start(workshop, *options))
        workshop.read("ready0")
        (workshop.path / "ready0").unlink()
    command = f"shoal run {' '.join(options)} script.py (in {workshop.path})"
    named = "".join(f"\n  --job {pid}: {command}" for pid in sorted(job.pid for job in jobs))
    several = f"shoal: several jobs of shoal run --max are running: choose one of them{named}\n"
    assert scale(workshop, "2") == (2, several)
    assert scale(workshop, "--job", str(jobs[1].pid), "2")[0] == 0
    jobs[0].send_signal(signal.SIGKILL)
    jobs[0].wait()
    assert scale(workshop, "2")[0] == 0, "the socket of a killed launcher is not there"
    (workshop.path / "go").touch()
    assert jobs[1].wait() == 0
    assert scale(workshop, "2") == none
    assert scale(workshop, "--job", str(jobs[1].pid), "2")[0] == 2
    until(lambda: not list(Path(workshop.path).glob("long*/shoal-*/launcher-*")))


@pytest.mark.parametrize(
    "options", [("-n", "2", "--max", "4"), ("-n", "4", "--min", "1", "--max", "2")], ids=["min", "size"]
)
def test_the_bounds_are_checked(workshop: Workshop, options: tuple[str, ...]) -> None:
    code, _, err = workshop.end(workshop.shoal("run", *options, "script.py"))
    assert code == 2
    assert b"--max" in err


@dataclass
class Process:
    status: int | None
    leaving: bool
    is_member: bool


_processes = st.builds(Process, st.sampled_from([None, None, 0, -9]), st.booleans(), st.booleans())


@given(st.integers(1, 6), st.integers(0, 3), st.dictionaries(st.integers(0, 5), _processes), st.data())
def test_a_plan_gives_as_many_processes_as_are_wanted(
    wanted: int, more: int, last: dict[int, Process], data: st.DataObject
) -> None:
    max_ranks = max([wanted, *(slot + 1 for slot in last)]) + more
    idle = [slot for slot in range(max_ranks) if slot not in last or last[slot].status is not None]
    waiting = set(data.draw(st.lists(st.sampled_from(idle)))) if idle else set()
    found = plan_scale(wanted, range(max_ranks), last, waiting)
    running = {slot for slot, each in last.items() if each.status is None}
    leaving = {slot for slot in running if last[slot].leaving}
    used = (running - leaving) | waiting
    kept = used - set(found.stop)
    assert set(found.stop) <= used
    assert set(found.start) <= set(range(max_ranks)) - running - waiting
    assert len(kept) + len(found.start) + found.later == wanted
    assert not found.later or len(kept | set(found.start) | leaving) == max_ranks, "no slot is left free"
    assert not (found.start and found.stop)
    members = {slot for slot in used & running if last[slot].is_member}
    assert len(kept & members) == min(wanted, len(members)), "members stay"


def test_scale_starts_without_torch() -> None:
    code = "import sys, shoal.launch.commands.scale; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
