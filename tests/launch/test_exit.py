"""How a job ends: exit codes, failures that end the others, what is left behind."""

from __future__ import annotations

import textwrap
from pathlib import Path

import psutil
import pytest

from tests.support.quick_launcher import QuickLauncher
from tests.support.waiting import until

from .conftest import Workshop, alive


def test_a_job_whose_ranks_all_finish_ends_with_0_and_says_nothing(workshop: Workshop) -> None:
    assert workshop.run("print(rank)", ranks=1) == (0, b"[0] 0\n", b"")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, b"exit code 7"),
        ("sys.exit(255)", 255, b"exit code 255"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, b"killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, b"killed by SIGKILL"),
        ("raise ValueError('no such fish')", 1, b"  | ValueError: no such fish"),
    ],
)
def test_the_exit_code_of_a_failed_rank_is_the_launchers(
    workshop: Workshop, end: str, code: int, words: bytes
) -> None:
    returned, _, err = workshop.run(f"if rank == 1: {end}\ntime.sleep(600)")
    assert returned == code
    assert b"shoal: rank 1 failed first: " in err
    assert words in err
    assert b"shoal: rank 0 was ended by the launcher" in err


def test_ranks_that_ignore_sigterm_end_with_a_failed_one_all_the_same(workshop: Workshop) -> None:
    code, _, _ = workshop.run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(f"pid{rank}", os.getpid())
        if rank == 2:
            await_file("pid0"), await_file("pid1")
            sys.exit(3)
        time.sleep(600)
        """,
        ranks=3,
    )
    assert code == 3
    assert not any(alive(pid) for pid in workshop.pids("pid0", "pid1", "pid2"))


def test_ranks_may_finish_long_before_the_others(workshop: Workshop) -> None:
    code, out, err = workshop.run(
        """
        if rank == 0:
            tell("pid", os.getpid())
        else:
            await_file("pid")
            while " Z " not in open(f"/proc/{open('pid').read()}/stat").read():
                time.sleep(0.005)
            print("done")
        """
    )
    assert (code, out, err) == (0, b"[1] done\n", b"")


def test_the_summary_names_the_rank_that_failed_before_all_others(workshop: Workshop) -> None:
    # The others fail because rank 2 did, as ranks do whose peer is lost; and faster than SIGTERM comes.
    code, _, err = workshop.run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 2:
            for other in (0, 1, 3):
                await_file(f"ready{other}")
            tell("pid", os.getpid())
            print("the reason", file=sys.stderr)
            os._exit(5)
        tell(f"ready{rank}")
        await_file("pid")
        pid = open("pid").read()
        while " Z " not in open(f"/proc/{pid}/stat").read():
            pass
        print("rank 2 is lost", file=sys.stderr)
        os._exit(1)
        """,
        ranks=4,
    )
    assert code == 5
    assert b"shoal: rank 2 failed first: exit code 5" in err
    assert err.endswith(b"'s stderr:\n  | the reason\n")


def test_the_summary_shows_only_the_end_of_a_long_stderr(workshop: Workshop) -> None:
    code, _, err = workshop.run(
        "for line in range(1000): print('line', line, file=sys.stderr)\nos._exit(4)", ranks=1
    )
    assert code == 4
    shown = err.partition(b"'s stderr:\n")[2].splitlines()
    assert shown == [b"  | line %d" % line for line in range(980, 1000)]


def test_what_ranks_leave_running_is_killed_and_named(workshop: Workshop) -> None:
    code, _, err = workshop.run(
        """
        if os.fork() == 0:
            tell(f"child{rank}", os.getpid())
            time.sleep(600)
            os._exit(0)
        await_file(f"child{rank}")
        """
    )
    children = workshop.pids("child0", "child1")
    assert code == 0
    assert err.startswith(b"shoal: killed processes that the ranks left running: ")
    assert all(b"(%d)" % child in err for child in children)
    assert not any(alive(child) for child in children)


def test_helpers_that_end_with_their_rank_are_not_mentioned(launcher: QuickLauncher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        end, _ = os.pipe()
        if os.fork() == 0:
            os.close(_)
            os.read(end, 1)  # until the rank is gone
            time.sleep(0.05)
            os._exit(0)
        """)
    )
    assert launcher.run(2, str(script), _LINGER_S=30.0) == (0, "", "")


def test_the_launcher_does_not_wait_for_a_daemon_that_left_its_group(workshop: Workshop) -> None:
    code, out, _ = workshop.run(
        """
        if os.fork() == 0:
            os.setsid()
            tell("daemon", os.getpid())
            time.sleep(600)
        await_file("daemon")
        print("done")
        """,
        ranks=1,
    )
    (daemon,) = workshop.pids("daemon")
    assert alive(daemon)
    psutil.Process(daemon).kill()
    assert (code, out) == (0, b"[0] done\n")


def test_an_ended_launcher_leaves_no_process_at_all(workshop: Workshop) -> None:
    launcher = workshop.start("tell(f'here{rank}'); await_file('go')")
    workshop.read("here0"), workshop.read("here1")
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) == 3  # two ranks and the guardian
    (workshop.path / "go").touch()
    assert workshop.end(launcher)[0] == 0
    until(lambda: not any(child.is_running() for child in children))
