"""Processes that wait to take the place of a rank: ``shoal run --spares``."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

import shoal
from shoal.launch.ranks.environment import Job
from tests.support.quick_launcher import QuickLauncher

from .conftest import Workshop, alive
from .test_respawn import PRELUDE, said

#: rank 1 dies at step 6, when a spare waits; the others train until they are SIZE again
TRAINING = """
import os, signal, time
import torch
from shoal import elastic

slot = os.environ["SHOAL_LOCAL_RANK"]
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(64, 4)
samples = elastic.Samples(len(x), batch=8)
with elastic.Session(elastic.State(model=net, optimizer=opt, samples=samples), max_size=MAX) as session:
    model = session.parallel(net)
    for step in session.steps():
        with step:
            (model(x[step.indices]).square().mean() * step.weight).backward()
            if step.number == 3 and "SHOAL_JOIN" not in os.environ:
                while session.group.rank == 0 and not session.waiting:
                    time.sleep(0.005)
            if step.number == 6 and slot == "1" and "SHOAL_JOIN" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit()
            opt.step()
            opt.zero_grad()
        assert session.group.size <= SIZE
        if step.number > 6 and session.group.size == SIZE:
            break
    print(f"{session.group.rank} of {session.group.size}")
"""


def test_a_session_holds_spares_back_until_a_rank_dies(launcher: QuickLauncher, tmp_path: Path) -> None:
    """One of two spares takes the place; the other one still waits when the session ends."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace("MAX", "None").replace("SIZE", "2"))
    code, out, err = launcher.run(2, str(script), min_ranks=1, spares=2)
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert lines[0] == "[0] 0 of 2"
    assert lines[1] in ("[2] 1 of 2", "[3] 1 of 2")
    assert len(lines) == 2
    first, last = err.splitlines()
    assert "rank 1 failed: killed by SIGKILL" in first
    # The launcher may hear of the end when the place has been taken already.
    taken, waits = lines[1][1], {"2": "3", "3": "2"}[lines[1][1]]
    assert first.endswith(
        ("; ranks 2, 3 can replace it", f"; ranks 0, {taken} go on; rank {waits} can replace it")
    )
    assert last == f"shoal: 2 of 2 ranks finished; rank 1 was killed by SIGKILL; rank {taken} finished"


def test_a_session_with_a_maximum_of_its_own_takes_spares_in(launcher: QuickLauncher, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = TRAINING.replace("MAX", "3").replace("SIZE", "3")
    script.write_text(text.replace("step.number == ", "step.number == -"))
    code, out, err = launcher.run(2, str(script), min_ranks=1, spares=1)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] 0 of 3", "[1] 1 of 3", "[2] 2 of 3"]


#: rank 1 leaves after another number of ranks is wanted; the other one goes on for some steps
LEAVING = """
            if step.number == 4 and slot == "0":
                place = session.group.world.membership.place
                set_wanted_size(place.venue.store, 1, job=place.job)
            if step.number == 5 and slot == "1":
                session.leave()
            step.commit()
"""


def test_no_spare_takes_the_place_of_a_rank_that_leaves_as_fewer_are_wanted(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    text = TRAINING.replace("MAX", "None").replace("SIZE:", "1 and step.number > 20:").replace("SIZE", "2")
    text = text.replace("            step.commit()\n", LEAVING).replace("step.number == 6 and", "False and")
    script.write_text("from shoal.rendezvous import set_wanted_size\n" + text)
    code, out, err = launcher.run(2, str(script), min_ranks=1, spares=1)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] 0 of 1", "[1] 1 of 2"]


def start(workshop: Workshop, *options: str, script: str) -> subprocess.Popen[bytes]:
    (workshop.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    return workshop.shoal("run", *options, "script.py")


def test_spares_that_join_nobody_end_with_the_ranks(workshop: Workshop) -> None:
    """They do not keep the job alive, whether they wait for ever, have failed, or have ended."""
    script = """
        if slot == "2":
            tell("waits", os.getpid())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        assert os.environ["SHOAL_SESSION_SIZE"] == "2"
        if slot == "3":
            sys.exit(5)
        await_file("waits")
        if not joins:
            await_file("go")
    """
    job = start(workshop, "-n", "2", "--min", "2", "--spares", "3", script=script)
    line = said(job, "rank 3 failed: exit code 5")
    assert line.endswith("ranks 0, 1 go on\n")
    (workshop.path / "go").touch()
    code, _, err = workshop.end(job)
    assert (code, err) == (0, b"shoal: 2 of 2 ranks finished; rank 3 ended with exit code 5\n")
    assert not alive(*workshop.pids("waits"))


def test_a_spare_is_replaced_after_it_has_taken_a_place(workshop: Workshop) -> None:
    script = """
        if slot == "2" and joins:
            tell("spare")
            await_file("died")
            join()
            tell("joined")
        elif slot == "1" and not joins:
            await_file("spare")
            tell("died")
            sys.exit(3)
        elif joins:
            await_file("joined")
            tell("next")
            time.sleep(600)
        await_file("next")
    """
    job = start(workshop, "-n", "2", "--min", "1", "--respawn", "--spares", "1", script=script)
    first = said(job, "rank 1 failed")
    assert first.endswith("a new process starts in its slot in 1 s\n")
    code, _, err = workshop.end(job)
    last = b"shoal: 2 of 2 ranks finished; rank 1 ended with exit code 3; rank 2 finished\n"
    assert (code, err) == (0, last)


def test_scale_counts_ranks_and_not_spares(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(workshop.path))
    script = """
        def leave(number, frame):
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        tell("ready" + slot)
        await_file("go")
    """
    job = start(workshop, "-n", "2", "--min", "1", "--max", "3", "--spares", "1", script=script)
    for slot in "012":
        workshop.read("ready" + slot)
    said_by = []
    for number in "4", "3", "1":
        code, out, err = workshop.end(workshop.shoal("scale", number))
        said_by.append((code, (out + err).decode()))
        if number == "3":
            workshop.read("ready3")
    assert said_by == [
        (2, "shoal: 4: the job runs with --min 1 --max 3\n"),
        (0, "shoal: 3 ranks wanted: rank 3 starts\n"),
        (0, "shoal: 1 rank wanted: ranks 1, 3 leave\n"),
    ]
    (workshop.path / "go").touch()
    assert workshop.end(job)[0] == 0


def test_spares_need_to_know_how_many_must_go_on(workshop: Workshop) -> None:
    code, _, err = workshop.end(workshop.shoal("run", "-n", "2", "--spares", "1", "script.py"))
    assert code == 2
    assert err == b"shoal: --spares needs --min N: the job ends when fewer than N ranks are left\n"


def test_only_a_job_with_spares_says_how_large_its_sessions_are() -> None:
    assert Job(4, 1).variables(0, "", "")["SHOAL_SESSION_SIZE"] == "4"
    assert "SHOAL_SESSION_SIZE" not in Job(4).variables(0, "", "")


def test_a_process_without_a_place_is_told_so_and_disturbs_no_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_JOIN", "1")
    with pytest.raises(shoal.ConfigurationError, match="it can join a running session"):
        shoal.init()
