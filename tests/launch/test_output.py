"""The ranks' output on its way through the launcher."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from datetime import datetime

import pytest

from tests.support.waiting import until

from .conftest import Workshop

#: the time before a line
STAMP = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}) ", re.MULTILINE)


def test_many_lines_of_many_ranks_stay_whole_and_in_order(workshop: Workshop) -> None:
    code, out, err = workshop.run(
        """
        for i in range(2000):
            os.write(1, b"out %d " % i)
            os.write(1, b"x" * (i % 300) + b"\\n")
            os.write(2, b"err %d\\n" % i)
        """,
        ranks=4,
    )
    assert code == 0
    for rank in range(4):
        of_rank = re.compile(rb"^\[%d\] (.*)$" % rank, re.MULTILINE)
        assert of_rank.findall(out) == [b"out %d " % i + b"x" * (i % 300) for i in range(2000)]
        assert of_rank.findall(err) == [b"err %d" % i for i in range(2000)]
    assert len(out.splitlines()) == len(err.splitlines()) == 8000


def test_stdout_and_stderr_in_one_pipe_stay_whole(workshop: Workshop) -> None:
    code, out, _ = workshop.run(
        """
        for i in range(500):
            for fd in (1, 2):
                os.write(fd, b"one ")
                os.write(fd, b"two\\n")
        """,
        stderr=subprocess.STDOUT,
    )
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] one two"] * 1000 + [b"[1] one two"] * 1000


def test_bytes_pass_unharmed(workshop: Workshop) -> None:
    code, out, _ = workshop.run(
        """
        sys.stdout.write("fish \\N{FISH} \\n")
        sys.stdout.flush()
        os.write(1, bytes(i for i in range(256) if i not in b"\\r\\n") + b"\\r\\n" + b"no end")
        """,
        ranks=1,
    )
    binary = bytes(i for i in range(256) if i not in b"\r\n")
    assert code == 0
    assert out == "[0] fish \N{FISH} \n".encode() + b"[0] " + binary + b"\r\n[0] no end\n"


def test_prefixes_of_more_than_ten_ranks_are_equally_wide(workshop: Workshop) -> None:
    code, out, _ = workshop.end(workshop.shoal("run", "-n", "11", "sh", "-c", "echo $SHOAL_RANK"))
    assert code == 0
    assert sorted(out.splitlines()) == [b"[%2d] %d" % (rank, rank) for rank in range(11)]


def test_a_reader_that_does_not_read_does_not_delay_the_end_of_the_ranks(workshop: Workshop) -> None:
    launcher = workshop.start(
        """
        if rank == 1:
            await_file("go")
            tell("failed")
            sys.exit(6)
        signal.signal(signal.SIGTERM, lambda number, frame: (tell("told"), os._exit(0)))
        tell("go")
        while True:
            os.write(1, b"y" * 99 + b"\\n")
        """
    )
    workshop.read("failed")
    # Nothing was read so far, so rank 0 fills every buffer; SIGTERM reaches it all the same.
    workshop.read("told")
    assert workshop.end(launcher)[0] == 6


def test_a_reader_that_goes_away_is_noticed_by_the_ranks(workshop: Workshop) -> None:
    launcher = workshop.start(
        """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        while True:
            print("y" * 99)
        """
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline().endswith(b"yyy\n")
    launcher.stdout.close()
    assert launcher.stderr is not None
    err = launcher.stderr.read()
    assert launcher.wait(60) == 141
    assert b"killed by SIGPIPE" in err


class Terminal:
    """A pseudo terminal for a launcher's three standard files."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.seen = b""

    def files(self) -> dict[str, int]:
        return {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}

    def await_text(self, text: bytes) -> None:
        def found() -> bool:
            self._read()
            return text in self.seen

        until(found)

    def rest(self) -> bytes:
        os.close(self.slave)
        with contextlib.suppress(OSError):  # EIO is the end of a terminal
            while True:
                self._read()
        os.close(self.master)
        return self.seen

    def _read(self) -> None:
        data = os.read(self.master, 4096)
        if not data:
            raise OSError("the end")
        self.seen += data


def test_on_a_terminal_prefixes_have_colours_and_ranks_are_told_of_it(workshop: Workshop) -> None:
    terminal = Terminal()
    launcher = workshop.start(
        "sys.stdout.write(f\"colours {os.environ['FORCE_COLOR']} {os.environ['COLUMNS']}\\n\")",
        **terminal.files(),
    )
    assert launcher.wait(60) == 0
    lines = terminal.rest().splitlines()
    assert sorted(lines) == [
        b"\x1b[33m[1]\x1b[0m colours 1 76",
        b"\x1b[36m[0]\x1b[0m colours 1 76",
    ]


def test_a_prompt_of_rank_0_is_shown_and_answered_on_the_terminal(workshop: Workshop) -> None:
    terminal = Terminal()
    launcher = workshop.start("print('hello', input('name? ') if rank == 0 else '')", **terminal.files())
    terminal.await_text(b"name? ")
    os.write(terminal.master, b"shoal\n")
    assert launcher.wait(60) == 0
    assert b"hello shoal" in terminal.rest()


def test_an_unfinished_line_that_goes_on_growing_is_shown(workshop: Workshop) -> None:
    terminal = Terminal()
    launcher = workshop.start(
        """
        while not os.path.exists("go"):
            os.write(1, b".")
            time.sleep(0.01)
        """,
        ranks=1,
        **terminal.files(),
    )
    terminal.await_text(b"...")
    (workshop.path / "go").touch()
    assert launcher.wait(60) == 0
    terminal.rest()


@pytest.mark.parametrize("options", [[], ["--collapse", "--timestamps"]], ids=["plain", "collapsed"])
def test_a_progress_bar_is_redrawn_below_the_lines_of_others(workshop: Workshop, options: list[str]) -> None:
    terminal = Terminal()
    launcher = workshop.start(
        r"""
        if rank == 0:
            for step in range(4):
                sys.stderr.write(f"\r {step}/3")
                sys.stderr.flush()
                await_file(f"go{step}")
            sys.stderr.write("\n")
        else:
            await_file("speak")
            print("a line")
            tell("spoken")
        """,
        options=options,
        **terminal.files(),
    )
    terminal.await_text(b" 0/3")
    (workshop.path / "speak").touch()
    terminal.await_text(b"a line\r\n")
    for step in range(4):
        (workshop.path / f"go{step}").touch()
    assert launcher.wait(60) == 0
    rows = terminal.rest().replace(b"\x1b[?7l", b"").replace(b"\x1b[?7h", b"").split(b"\r\n")
    shown = [re.sub(rb"\x1b\[\d+m", b"", row.rpartition(b"\r\x1b[K")[2]) for row in rows]
    if options:
        shown = [STAMP.sub(b"", row).replace(b"[  ", b"[") for row in shown if not row or STAMP.match(row)]
    assert shown == [b"[1] a line", b"[0]  3/3", b""]


def test_with_timestamps_each_line_has_one_everywhere(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text(
        "import os, sys\n"
        "print('out\\n\\nout'); sys.stdout.write('10%\\r20%\\r'); sys.exit(os.environ['RANK'] == '1')"
    )
    before = datetime.now().isoformat(timespec="milliseconds")
    options = ("-n", "2", "--timestamps", "--log-dir", "logs")
    code, out, err = workshop.end(workshop.shoal("run", *options, "script.py"))
    after = datetime.now().isoformat(timespec="milliseconds")
    assert code == 1
    logs = [(workshop.path / "logs" / f"{name}.log").read_bytes() for name in ("rank0", "rank1", "launcher")]
    for text in (out, err, *logs):
        times = [STAMP.match(line) for line in text.splitlines() if line]
        assert all(times)
        assert [t[0] for t in times if t] == sorted(t[0] for t in times if t)
        assert all(before <= t[1].decode() <= after for t in times if t)
    written = [b"out", b"", b"out", b"10%", b"20%"]
    assert [STAMP.sub(b"", line) for line in logs[1].splitlines()] == written
    shown = [STAMP.sub(b"", line) for line in out.splitlines() if b" [1] " in line]
    assert shown == [b"[1] " + text for text in written]
    assert STAMP.match(logs[2])
    assert STAMP.sub(b"", logs[2]).startswith(b"shoal: rank 1 failed first")


def test_each_rank_has_a_log_of_whole_lines_in_the_place_of_an_older_one(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text(
        "import os, sys\n"
        "for i in range(300): print('out', i); print('err', i, file=sys.stderr)\n"
        "print(os.environ['RANK'], end='')\n"
    )
    (workshop.path / "logs").mkdir()
    (workshop.path / "logs" / "rank0.log").write_text("of an older run, " * 10_000)
    launcher = workshop.shoal("run", "-n", "2", "--no-prefix", "--log-dir", "logs", "script.py")
    code, out, _ = workshop.end(launcher)
    assert code == 0
    assert sorted(out.split(b"\n"))[:3] == [b"", b"0", b"1"]
    for rank in (0, 1):
        lines = (workshop.path / "logs" / f"rank{rank}.log").read_text().splitlines()
        expected = [f"{stream} {i}" for stream in ("out", "err") for i in range(300)]
        assert sorted(lines) == sorted([*expected, str(rank)])


def test_what_the_launcher_says_has_a_log_too(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text("import sys; sys.exit(3)")
    code, _, err = workshop.end(workshop.shoal("run", "--log-dir", "logs", "script.py"))
    assert (code, err) == (3, (workshop.path / "logs" / "launcher.log").read_bytes())
    assert b"shoal: rank 0 failed first: exit code 3" in err


def test_the_logs_of_an_earlier_job_with_more_ranks_go(workshop: Workshop) -> None:
    logs = workshop.path / "logs"
    logs.mkdir()
    for name in ("rank0.log", "rank1.log", "rank7.log", "rankings.log"):
        (logs / name).write_text("older\n")
    (workshop.path / "script.py").write_text("print('newer')")
    assert workshop.end(workshop.shoal("run", "--log-dir", "logs", "script.py"))[0] == 0
    found = {path.name: path.read_text() for path in logs.iterdir()}
    assert found == {"launcher.log": "", "rank0.log": "newer\n", "rankings.log": "older\n"}


def test_a_log_that_cannot_be_written_any_more_is_reported_once_and_the_job_goes_on(
    workshop: Workshop,
) -> None:
    (workshop.path / "rank0.log").symlink_to("/dev/full")
    (workshop.path / "script.py").write_text("for i in range(100): print(i, flush=True)")
    code, out, err = workshop.end(workshop.shoal("run", "--log-dir", ".", "script.py"))
    assert (code, len(out.splitlines())) == (0, 100)
    assert err == b"shoal: the log of rank 0 ends here: No space left on device\n"


def test_a_full_disk_behind_stdout_is_named_and_the_job_goes_on(workshop: Workshop) -> None:
    script = """
    for _ in range(3000):
        print("x" * 100)
    tell(f"went on {rank}")
    print("the end", file=sys.stderr)
    """
    with open("/dev/full", "wb") as full:
        code, _, err = workshop.run(script, stdout=full)
    assert code == 74
    told = (
        b"shoal: stdout cannot be written: No space left on device; output is lost from here on, and the job"
    )
    assert sorted(err.splitlines()) == [b"[0] the end", b"[1] the end", told + b" goes on"]
    assert workshop.read("went on 0") == workshop.read("went on 1") == ""


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_the_last_lines_that_a_full_disk_does_not_take_are_no_success(workshop: Workshop, where: str) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = workshop.run(f"print('late', file=sys.{where})", ranks=1, **{where: full})
    assert code == 74
    assert (err or b"").startswith(b"" if where == "stderr" else b"shoal: stdout cannot be written: No space")


def test_other_commands_name_a_full_disk_too(workshop: Workshop) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = workshop.end(workshop.shoal("run", "--dry-run", "sh", stdout=full))
    assert (code, err) == (74, b"shoal: stdout cannot be written: No space left on device\n")


def test_a_file_that_another_process_made_non_blocking_is_written_to_its_end(workshop: Workshop) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    job = workshop.start("print('x' * 500_000)", ranks=1, stdout=writer)
    os.close(writer)
    with open(reader, "rb") as file:
        assert len(file.read()) == len("[0] ") + 500_001
    assert job.wait() == 0
