"""Ranks leave a session at the end of a step, and the others go on; or all end there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from shoal import ProcessGroup
from shoal.elastic import Samples, Session, State, Step, signals
from shoal.elastic.signals import LeaveRequest
from shoal.testing import faults, no_leaks, processes, run_threads
from tests.support.quick_launcher import QuickLauncher

from .training import STEPS, Log, assert_as_undisturbed, train

PATIENCE = 60.0
AT = 5


def leaving(group: ProcessGroup, leavers: list[int], min_ranks: int, point: str = "before commit") -> Log:
    """Train; ranks leave at a point of a step."""
    me = group.rank

    def visit(here: str, step: Step) -> None:
        session = step._session
        assert isinstance(session, Session)
        if me in leavers and (step.number, here) == (AT, point):
            session.leave()
        if here == "after the last" and (me not in leavers or min_ranks > 1):
            row = torch.empty(session.group.size)
            session.group.all_gather_single(row, torch.ones(1)).wait()  # the group is whole

    return train(group, visit, min=min_ranks)


@pytest.mark.parametrize("point", ["before commit", "after commit", "between"])
def test_a_rank_leaves_at_the_end_of_a_step_and_the_others_go_on(point: str) -> None:
    logs = run_threads(leaving, 4, [0, 2], 1, point)
    stayed, left = [logs[1], logs[3]], [logs[0], logs[2]]
    assert_as_undisturbed(stayed)
    last = AT + (point == "after commit")
    for log in stayed:
        (event,) = log.events
        assert (event.step, event.again, event.left, event.lost) == (last + 1, False, (0, 2), ())
        assert (event.previous_size, event.size) == (4, 2)
    for log in left:
        assert [each.digest for each in log.steps] == [each.digest for each in logs[1].steps[: last + 1]]


@pytest.mark.parametrize("leavers", [[1], [0, 1, 2]])
def test_all_end_where_too_few_would_be_left(leavers: list[int]) -> None:
    logs = run_threads(leaving, 3, leavers, 3)
    assert_as_undisturbed(logs, until=AT + 1)
    assert [event.left for log in logs for event in log.events] == [()] * 3


def parting(group: ProcessGroup, leavers: list[int], victim: int, late: int) -> tuple[bool, Log]:
    """Train; SIGTERM comes to ranks in the step in whose commit another one dies.

    The rank ``late`` hears of that death, and not of the end of the commit.
    """
    me, found = group.rank, []

    def exchange(session: Session, step: Step) -> None:
        whole(session, step)
        if (step.number, me) == (AT, late):
            session._members.leavers = ()
            while True:
                group.barrier().wait()

    whole = Session.exchange
    Session.exchange = exchange  # type: ignore[method-assign]

    def visit(here: str, step: Step) -> None:
        if (step.number, here) == (AT, "before commit"):
            if me in leavers:
                os.kill(os.getpid(), signal.SIGTERM)
            if me == victim and late < 0:
                faults.die_at(group, "finished")
        if (step.number, here, me) == (AT, "after commit", victim):
            os.kill(os.getpid(), signal.SIGKILL)
        if here == "after the last":
            found.append(step._session.left)  # type: ignore[attr-defined]

    log = train(group, visit)
    return found[0], log


@pytest.mark.parametrize(("victim", "late"), [(-1, -1), (0, -1), (3, 2), (3, 1)])
def test_a_rank_that_gets_sigterm_leaves_whoever_dies_meanwhile(victim: int, late: int) -> None:
    with no_leaks(), processes(parting, 4, [1], victim, late, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    assert sum(not each.ok for each in outcomes) == (victim >= 0)
    logs = {rank: each.value for rank, each in enumerate(outcomes) if each.ok}
    left, gone = logs.pop(1)
    assert left
    assert AT < len(gone.steps) < STEPS
    assert not any(has_left for has_left, _ in logs.values())
    assert_as_undisturbed([log for _, log in logs.values()])
    for _, log in logs.values():
        assert sum(len(event.lost) for event in log.events) == (victim >= 0)
        assert sum(len(event.left) for event in log.events) == 1


@pytest.mark.parametrize(("victim", "late"), [(-1, -1), (0, -1), (3, 2), (3, 1)])
def test_a_job_that_gets_sigterm_ends_at_one_step_whoever_dies_meanwhile(victim: int, late: int) -> None:
    with no_leaks(), processes(parting, 4, [0, 1, 2, 3], victim, late, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    assert sum(not each.ok for each in outcomes) == (victim >= 0)
    values = [each.value for each in outcomes if each.ok]
    assert all(left for left, _ in values)
    ends = {len(log.steps) for _, log in values}
    assert len(ends) == 1
    assert_as_undisturbed([log for _, log in values], until=ends.pop())


class Handled(Exception):
    """What a handler of the program raises."""


@pytest.fixture
def handler() -> Any:
    def handle(number: int, frame: Any) -> None:
        raise Handled(signal.Signals(number).name)

    former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield handle
    for number, before in former.items():
        signal.signal(number, before)


def test_a_second_signal_does_what_it_did_before(handler: Any) -> None:
    leave_request = LeaveRequest(lambda: True)
    leave_request.listen()
    signal.raise_signal(signal.SIGTERM)
    assert leave_request.requested
    with pytest.raises(Handled, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler
    waiting = LeaveRequest(lambda: False)
    waiting.listen()
    with pytest.raises(Handled):
        signal.raise_signal(signal.SIGTERM)
    assert not waiting.requested


def test_the_signal_that_comes_after_the_end_that_it_was_to_bring_is_no_second_one(
    handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_request = LeaveRequest(lambda: True)
    leave_request.listen()
    leave_request.close(leave_was_requested=True)
    signal.raise_signal(signal.SIGTERM)  # this rank's own
    with pytest.raises(Handled):
        signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(signals, "_SIGNAL_SPREAD_S", -1.0)
    leave_request = LeaveRequest(lambda: True)
    leave_request.listen()
    leave_request.close(leave_was_requested=True)
    with pytest.raises(Handled):  # of something else, later
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_it_ends_no_process_that_is_ending_already() -> None:
    """Python gives up its handlers, and C's exit takes long enough for a signal."""
    program = """if True:
        import ctypes, signal, sys
        from shoal.elastic.signals import LeaveRequest
        request = LeaveRequest(lambda: True)
        request.listen()
        request.close(leave_was_requested=True)
        libc = ctypes.CDLL(None)
        libc.on_exit(libc["raise"], None)  # raises the signal whose number is the exit code
        sys.exit(int(signal.SIGTERM))
    """
    ended = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE, check=False)
    assert ended.returncode == signal.SIGTERM


def test_usr1_counts_within_a_job_of_slurm(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in (None, "17"):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        if job is not None:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        with Session(State(samples=Samples(4, batch=1))) as session:
            if job is None:
                with pytest.raises(Handled, match="SIGUSR1"):
                    signal.raise_signal(signal.SIGUSR1)
            else:
                signal.raise_signal(signal.SIGUSR1)
            done = 0
            for step in session.steps(3):
                with step:
                    step.commit()
                done += 1
        assert (done, session.left) == ((3, False) if job is None else (1, True))
        assert signal.getsignal(signal.SIGUSR1) is handler


def test_signals_that_are_not_the_session_s_are_left_alone(handler: Any) -> None:
    def elsewhere() -> None:
        leave_request.listen()
        assert signal.getsignal(signal.SIGTERM) is handler

    leave_request = LeaveRequest(lambda: True)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_request.listen()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, handler)
    leave_request.listen()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by the program
    leave_request.close(leave_was_requested=False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PROGRAM = """
import os, pathlib, signal, time
from shoal import elastic

leaver = pathlib.Path(__file__).with_name("leaver")
state = elastic.State(samples=elastic.Samples(12, batch=6))
with elastic.Session(state, min_size=2) as session:
    me = session.group.rank
    for step in session.steps(until=8):
        with step:
            if me == 2 and step.number == 3:
                leaver.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGTERM)
            if step.number == 5:  # the other two, while the launcher looks at the end of that one
                while ") Z" not in pathlib.Path("/proc", leaver.read_text(), "stat").read_text():
                    time.sleep(0.01)
                time.sleep(0.2)
            step.commit()
    print(f"rank {me} after {state.steps} steps, left: {session.left}")
"""


def test_the_launcher_counts_a_rank_that_left_as_no_failure(launcher: QuickLauncher, tmp_path: Any) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    code, out, err = launcher.run(3, str(script), min_ranks=2, EARLY_EXIT_WARNING_S=0.0)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] rank 0 after 8 steps, left: False",
        "[1] rank 1 after 8 steps, left: False",
        "[2] rank 2 after 4 steps, left: True",
    ]
