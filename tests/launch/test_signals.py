"""Signals to the launcher reach the ranks."""

from __future__ import annotations

import re
import signal
import time

import pytest

from shoal.launch.job.launch import STOP_GRACE_S

from .conftest import PRELUDE, Workshop, alive


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_reach_every_rank_and_the_job_goes_on(
    workshop: Workshop, number: signal.Signals
) -> None:
    launcher = workshop.start(
        """
        def got(number, frame):
            tell(f"got{rank}", number)
        signal.signal(signal.SIGUSR1, got)
        signal.signal(signal.SIGUSR2, got)
        tell(f"ready{rank}")
        await_file("go")
        print("done")
        """
    )
    workshop.read("ready0"), workshop.read("ready1")
    launcher.send_signal(number)
    assert {workshop.read("got0"), workshop.read("got1")} == {str(int(number))}
    (workshop.path / "go").touch()
    code, out, err = workshop.end(launcher)
    assert (code, sorted(out.splitlines()), err) == (0, [b"[0] done", b"[1] done"], b"")


def test_a_user_signal_spares_the_children_of_a_rank(workshop: Workshop) -> None:
    launcher = workshop.start(
        """
        if os.fork() == 0:
            tell("child", os.getpid())
            await_file("go")
            os._exit(0)
        signal.signal(signal.SIGUSR1, lambda number, frame: tell("got"))
        await_file("child")
        tell("ready")
        print("the child ended with", os.wait()[1])
        """,
        ranks=1,
    )
    workshop.read("ready")
    launcher.send_signal(signal.SIGUSR1)
    workshop.read("got")
    (workshop.path / "go").touch()
    assert workshop.end(launcher) == (0, b"[0] the child ended with 0\n", b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_job_ends_with_128_and_the_signal(
    workshop: Workshop, number: signal.Signals, code: int
) -> None:
    launcher = workshop.start("tell(f'pid{rank}', os.getpid()); await_signal()")
    ranks = workshop.pids("pid0", "pid1")
    launcher.send_signal(number)
    returned, _, err = workshop.end(launcher)
    assert returned == code
    assert b"shoal: stopped by %s: ranks 0, 1 were killed by " % number.name.encode() in err
    assert b"failed first" not in err
    assert not any(alive(rank) for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_finish_their_work_on_a_signal_end_the_job_well(
    workshop: Workshop, number: signal.Signals
) -> None:
    launcher = workshop.start(
        """
        def save(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
        tell(f"ready{rank}")
        await_signal()
        """
    )
    workshop.read("ready0"), workshop.read("ready1")
    launcher.send_signal(number)
    code, out, err = workshop.end(launcher)
    assert (code, sorted(out.splitlines())) == (0, [b"[0] saved", b"[1] saved"])
    waits = rb"shoal: waiting [0-9]+ s for ranks? [01, ]+; press Ctrl-C again to kill\n"
    assert re.fullmatch(rb"(%s)?" % waits, err), err


def test_the_second_sigint_kills(workshop: Workshop) -> None:
    launcher = workshop.start(
        """
        def stubborn(number, frame):
            # The launcher takes signals in quick succession for one.
            time.sleep(0.3)
            tell(f"got{rank}")
        signal.signal(signal.SIGINT, stubborn)
        tell(f"pid{rank}", os.getpid())
        await_signal()
        """
    )
    ranks = workshop.pids("pid0", "pid1")
    launcher.send_signal(signal.SIGINT)
    workshop.read("got0"), workshop.read("got1")
    assert all(alive(rank) for rank in ranks)
    assert launcher.stderr is not None
    said = launcher.stderr.readline()
    assert re.fullmatch(rb"shoal: waiting \d\d s for ranks 0, 1; press Ctrl-C again to kill\n", said)
    launcher.send_signal(signal.SIGINT)
    code, _, err = workshop.end(launcher)
    assert code == 130
    assert b"ranks 0, 1 were killed by SIGKILL" in err
    assert not any(alive(rank) for rank in ranks)


def test_the_time_from_sigterm_to_sigkill_is_an_option(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text(
        PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell('ready'); time.sleep(600)"
    )
    launcher = workshop.shoal("run", "--grace", "0.2", "script.py")
    workshop.read("ready")
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    code, _, err = workshop.end(launcher)
    assert (code, err) == (143, b"shoal: stopped by SIGTERM: rank 0 was killed by SIGKILL\n")
    assert time.monotonic() - began < STOP_GRACE_S


@pytest.mark.parametrize("grace", ["-1", "soon", "nan"])
def test_the_time_to_sigkill_is_checked(workshop: Workshop, grace: str) -> None:
    code, _, err = workshop.end(workshop.shoal("run", "--grace", grace, "script.py"))
    assert code == 2
    assert b"--grace" in err
