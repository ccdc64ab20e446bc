"""``shoal run --hosts``, with a program in the place of ssh that runs the agents on this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.errors import UsageError
from shoal.launch.agent_protocol import PROTOCOL
from shoal.launch.cli import invoke
from shoal.launch.commands.on_hosts import passed_on
from shoal.launch.ranks.environment import divide_cores, usable_cores
from shoal.launch.remote.hosts import Host, parse_hosts, read_hostfile
from shoal.launch.remote.ssh import PROGRAM
from tests.support.fake_ssh import fake_ssh
from tests.support.waiting import until

from .conftest import PRELUDE, Workshop
from .test_collapse import collapsed
from .test_respawn import PRELUDE as RESPAWNED


@pytest.fixture
def far(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    """A workshop whose launchers reach any host; no agent is left after the test."""
    monkeypatch.setenv("SHOAL_SSH", fake_ssh(workshop.path))
    monkeypatch.setenv("SHOAL_TEST_MARK", str(workshop.path))
    yield workshop
    workshop.close()
    until(lambda: not marked(workshop.path), lambda: marked(workshop.path))


def marked(folder: Path) -> list[tuple[int, list[str]]]:
    """The living processes that were started for a folder's test."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = f"SHOAL_TEST_MARK={folder}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, process.cmdline()))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def start(
    far: Workshop, script: str, *options: str, hosts: str = "h1:2,h2:2", **settings: object
) -> subprocess.Popen[bytes]:
    (far.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    return far.shoal("run", "--hosts", hosts, *options, "script.py", **settings)


def run(
    far: Workshop, script: str, *options: str, hosts: str = "h1:2,h2:2", **settings: object
) -> tuple[int, str, str]:
    code, out, err = far.end(start(far, script, *options, hosts=hosts, **settings))
    return code, out.decode(), err.decode()


def test_ranks_are_numbered_host_by_host(far: Workshop) -> None:
    code, out, err = run(
        far,
        """
        names = ("HOST_ID", "LOCAL_RANK", "LOCAL_SIZE", "SIZE")
        print(*(os.environ["SHOAL_" + name] for name in names), os.environ["MASTER_ADDR"], os.getcwd())
        """,
        "-n",
        "4",
        hosts="h1:2,h2:1,h3:9",
    )
    places = ["h1 0 2", "h1 1 2", "h2 0 1", "h3 0 1"]
    expected = [f"[{rank}] {place} 4 127.0.0.1 {far.path}" for rank, place in enumerate(places)]
    assert (code, sorted(out.splitlines()), err) == (0, expected, "")


def test_this_machine_can_be_one_of_the_hosts(far: Workshop) -> None:
    code, out, err = run(far, "print(os.environ.get('SHOAL_HOST_ID'))", hosts="localhost,h2")
    assert (code, sorted(out.splitlines()), err) == (0, ["[0] None", "[1] h2"], "")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
    ],
)
def test_the_first_failure_is_named_with_its_host(far: Workshop, end: str, code: int, words: str) -> None:
    returned, _, err = run(
        far,
        f"""
        if rank == 2:
            print("no such fish", file=sys.stderr)
            {end}
        time.sleep(600)
        """,
    )
    assert returned == code
    lines = err.splitlines()
    assert lines[0] == "[2] no such fish"
    assert re.fullmatch(rf"shoal: rank 2 on h2 failed first: {words}, after .* s \(process \d+\)", lines[1])
    assert lines[2] == "shoal: ranks 0, 1, 3 were ended by the launcher"
    assert lines[3:] == ["shoal: the end of rank 2's stderr:", "  | no such fish"]


def test_each_host_deals_out_its_own_cores(far: Workshop) -> None:
    code, out, err = run(far, "print(sorted(os.sched_getaffinity(0)))", "--bind")
    shared = [sorted(share) for share in divide_cores(usable_cores(), 2)]
    assert (code, sorted(out.splitlines()), err) == (
        0,
        [f"[{rank}] {shared[rank % 2]}" for rank in range(4)],
        "",
    )


def test_stdin_goes_to_rank_0(far: Workshop) -> None:
    text = b"".join(b"line %d\n" % number for number in range(100_000))
    launcher = start(
        far, "data = sys.stdin.buffer.read(); print(rank, len(data), hash(data) == hash(b''))",
        stdin=subprocess.PIPE,
    )  # fmt: skip
    out, err = launcher.communicate(text, timeout=60)
    expected = [f"[{rank}] {rank} {0 if rank else len(text)} {bool(rank)}" for rank in range(4)]
    assert (launcher.returncode, sorted(out.decode().splitlines()), err) == (0, expected, b"")


def test_stdin_may_be_a_file_and_may_be_left_unread(far: Workshop) -> None:
    (far.path / "input").write_bytes(b"first\n" + b"x" * 1_000_000)
    with open(far.path / "input", "rb") as file:
        code, out, _ = run(far, "rank or print(sys.stdin.readline())", stdin=file)
    assert (code, out.splitlines()[0]) == (0, "[0] first")


def test_stdin_may_be_a_terminal_of_another_session(far: Workshop) -> None:
    ours, theirs = os.openpty()
    os.write(ours, b"x\n")
    try:
        assert run(far, "print(rank)", hosts="h1", stdin=theirs, start_new_session=True) == (0, "[0] 0\n", "")
    finally:
        os.close(ours)
        os.close(theirs)


def test_what_is_passed_on(far: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of the launcher's, on no command line; and what the user names."""
    monkeypatch.setenv("SHOAL_TIMEOUT", "77")
    monkeypatch.setenv("SHOAL_TEST_AT_HEAD", "fish")
    monkeypatch.setenv("SHOAL_INTERFACE", "127.0.0.1")
    monkeypatch.setenv("SHOAL_SECRET_FILE", "/of/the/launcher")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    code, out, err = run(
        far,
        """
        import glob
        environ = os.environ
        secret = environ["SHOAL_SECRET"]
        assert len(secret) == 64 and environ["SHOAL_TIMEOUT"] == "77"
        assert environ["OMP_NUM_THREADS"] == "3" and environ["SHOAL_TEST_AT_HEAD"] == "fish"
        for name in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                assert secret not in open(name, errors="replace").read()
            except OSError:
                pass
        print("good")
        """,
        "--env",
        "SHOAL_TEST_AT_HEAD",
    )
    assert (code, sorted(out.splitlines()), err) == (0, [f"[{rank}] good" for rank in range(4)], "")


def test_directory_and_interpreter_can_be_others(far: Workshop, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "there.py").write_text("import os, sys; print(os.getcwd(), sys.executable)")
    options = ["--chdir", "other", "--python", sys.executable, "--no-prefix"]
    code, out, err = far.end(far.shoal("run", "--hosts", "h1", *options, "there.py"))
    assert (code, out.decode(), err) == (0, f"{tmp_path / 'other'} {sys.executable}\n", b"")


def test_a_login_shell_that_talks_does_no_harm(far: Workshop) -> None:
    assert run(far, "print(rank)", hosts="chatty") == (0, "[0] 0\n", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["h1,refused"], ["host refused: ", "ssh ended with exit code 1\n", "Permission denied (public"]),
        (["noisy"], ["host noisy: ", "ssh ended with exit code 3\n", "  | bash: shoal: fish not found"]),
        (["h1,h2", "--chdir", "/no/such"], ["the directory /no/such cannot be entered: No such file"]),
        (["h1", "--python", "/no/python"], ["ssh ended with exit code 127\n", "/no/python"]),
        (["localhost", "--python", "/no/python"], ["/no/python could not be started: No such file"]),
    ],
)  # fmt: skip
def test_a_host_that_cannot_be_used_is_named_and_the_code_is_1(
    far: Workshop, options: list[str], words: list[str]
) -> None:
    (far.path / "script.py").write_text("open('ran', 'w')")
    code, out, err = far.end(far.shoal("run", "--hosts", *options, "script.py"))
    text = err.decode()
    assert (code, out) == (1, b""), text
    assert text.startswith("shoal: ")
    assert all(each in text for each in words), text
    assert not (far.path / "ran").exists()


def test_a_program_that_is_not_there_on_a_host_is_named(far: Workshop) -> None:
    code, out, err = far.end(far.shoal("run", "--hosts", "h1,h2", "--chdir", "/", "/no/such/program"))
    assert (code, out) == (1, b"")
    words = rb"shoal: host h(\d): rank \d could not be started: /no/such/program: No such file or directory\n"
    assert re.fullmatch(words, err)


def test_another_version_on_a_host_is_named(far: Workshop) -> None:
    code, _, err = run(far, "", hosts="old")
    assert code == 1
    assert f"host old: it runs shoal 9.9 (agents' protocol {PROTOCOL}), and this is shoal " in err


def test_respawn_takes_a_slot_of_a_host_that_lives(far: Workshop) -> None:
    """Slots 0 and 1 are lost; their successors run in the free slots of the third host."""
    (far.path / "script.py").write_text(
        PRELUDE.replace('os.environ["SHOAL_RANK"]', "os.environ.get('SHOAL_RANK', -1)")
        + textwrap.dedent(
            """
        if rank < 0:
            print("in the place", os.environ["SHOAL_HOST_ID"], flush=True)
            tell("new" + os.environ["SHOAL_LOCAL_RANK"])
            await_file("go")
            sys.exit()
        tell(f'here{rank}', os.getpid())
        await_file("go")
        """
        )
    )
    launcher = far.shoal(
        "run", "--hosts", "h1:2,h2:2,h3:2", "-n", "4", "--min", "2", "--respawn", "script.py"
    )
    pids = far.pids(*(f"here{rank}" for rank in range(4)))
    os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)
    far.read("new0"), far.read("new1")
    (far.path / "go").touch()
    code, out, err = far.end(launcher)
    assert (code, sorted(out.decode().splitlines())) == (0, ["[4] in the place h3", "[5] in the place h3"]), (
        err
    )


def test_sigint_before_any_agent_has_answered_ends_the_launcher(far: Workshop) -> None:
    (far.path / "fake_ssh").write_text("#!/bin/sh\ntouch started\nexec sleep 600\n")
    launcher = start(far, "")
    until((far.path / "started").exists)
    launcher.send_signal(signal.SIGINT)
    assert far.end(launcher) == (130, b"", b"")


def test_output_of_many_ranks_is_whole_and_unmixed(far: Workshop) -> None:
    """2 MB of each of 8 ranks."""
    lines = 10_000
    with open(far.path / "output", "wb") as file:
        launcher = start(
            far,
            f"""
            line = (str(rank) * 199) + "\\n"
            for _ in range({lines}):
                sys.stdout.write(line)
            """,
            hosts="h1:4,h2:4",
            stdout=file,
        )
        assert far.end(launcher)[::2] == (0, b"")
    counts = [0] * 8
    with open(far.path / "output", "rb") as found:
        for line in found:
            rank = int(line[1:2])
            assert line == b"[%d] %s\n" % (rank, b"%d" % rank * 199)
            counts[rank] += 1
    assert counts == [lines] * 8


def test_a_reader_that_does_not_read_delays_no_exit(far: Workshop) -> None:
    launcher = start(
        far,
        """
        if rank == 0:
            while True:
                sys.stdout.write("x" * 99 + "\\n")
        tell("here3") if rank == 3 else None
        if rank == 3:
            await_file("go")
            sys.exit(3)
        time.sleep(600)
        """,
        stderr=subprocess.DEVNULL,
    )
    far.read("here3")
    assert launcher.stdout is not None
    launcher.stdout.read(1)
    (far.path / "go").touch()
    until(
        lambda: not any("script.py" in " ".join(line) and "run" not in line for _, line in marked(far.path))
    )
    launcher.communicate(timeout=60)
    assert launcher.returncode == 3


def test_log_files_are_written_at_the_launchers_side(far: Workshop) -> None:
    assert run(far, "print('fish', rank)", "--log-dir", "logs", hosts="h1,h2")[0] == 0
    assert [(far.path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)] == [
        "fish 0\n",
        "fish 1\n",
    ]


def test_equal_lines_of_ranks_on_several_hosts_are_one_line(far: Workshop) -> None:
    code, out, _ = collapsed(
        far, "print('fish')", "--hosts", "h1:2,h2:2", "--timestamps", "--log-dir", "logs"
    )
    assert (code, [line.partition(" ")[2] for line in out]) == (0, ["[0-3] fish"])
    logs = [(far.path / "logs" / f"rank{rank}.log").read_text().partition(" ")[2] for rank in range(4)]
    assert logs == ["fish\n"] * 4


def test_the_log_of_a_process_in_the_place_of_another_one_names_no_wrong_process(far: Workshop) -> None:
    script = """
    if joins:
        tell("new")
        sys.exit()
    sys.exit(1) if os.environ["SHOAL_RANK"] == "1" else await_file("new")
    """
    (far.path / "script.py").write_text(RESPAWNED + textwrap.dedent(script))
    options = ["--hosts", "h1:2", "--min", "1", "--respawn", "--log-dir", "logs"]
    assert far.end(far.shoal("run", *options, "script.py"))[0] == 0
    assert (far.path / "logs" / "rank1.log").read_text() == "--- rank 1.1 ---\n"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_directory_that_is_not_utf8_is_refused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (odd := tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(odd)
    assert invoke(["run", "--hosts", "h1", *options, "true"]) == 2
    assert capsys.readouterr().err.endswith("caf\\udce9 is not UTF-8: name another one by --chdir\n")


def test_a_dry_run_prints_each_hosts_command(far: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_TOKEN", "fish")
    code, out, err = run(far, "", "--dry-run", "--env", "SHOAL_TEST_TOKEN", hosts="h1:2,me@h2:1")
    assert (code, err) == (0, "")
    ssh = "-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=2 -o ServerAliveCountMax=3"
    for host in ("h1", "me@h2"):
        line = next(line for line in out.splitlines() if line.startswith(f"host {host}: "))
        assert f" {ssh} {host} exec " in line
        _, _, there = line.partition(" exec ")
        words = shlex.split(" ".join(shlex.split(there)))
        assert words == [sys.executable, "-c", PROGRAM, "agent", "--stdio"]
    assert "  rank 2: " in out
    assert "SHOAL_SECRET=<secret>" in out
    assert "  SHOAL_TEST_TOKEN=<passed on>\n" in out
    assert "fish" not in out


def test_hosts_meet_in_the_store_of_the_launcher(far: Workshop) -> None:
    code, out, err = run(
        far,
        """
        from shoal import config
        from shoal.store import open_store
        with open_store(config.STORE.get(), secret=config.secret(), timeout=30) as store:
            print(store.add("arrivals", 1) > 0)
        """,
    )
    assert (code, sorted(out.splitlines()), err) == (0, [f"[{rank}] True" for rank in range(4)], "")


def test_what_names_hosts(tmp_path: Path) -> None:
    assert parse_hosts("h1:4, me@h2") == [Host("h1", 4, 0), Host("me@h2", 1, 4)]
    assert parse_hosts("[fe80::1]:2,10.0.0.7:3") == [Host("[fe80::1]", 2, 0), Host("10.0.0.7", 3, 2)]
    given = "h1,me@h2,[fe80::1],me@[fe80::1%eth0]:2"
    assert [host.destination for host in parse_hosts(given)] == ["h1", "me@h2", "fe80::1", "me@fe80::1%eth0"]
    file = tmp_path / "hosts"
    file.write_text("# ours\nh1 slots=4\n\nh2:2   # two\nh3\n")
    assert read_hostfile(file) == [Host("h1", 4, 0), Host("h2", 2, 4), Host("h3", 1, 6)]


@pytest.mark.parametrize(
    "text",
    ["-oProxyCommand=x:1", "h1:4,-v", "", "h1:0", "h1:-1", "h1:x", "h1 h2", "h1;ls", "$(x)", "h1:4,h1:2",
     "h1\n:2",     "me@-x", "-me@x", "h1:99999999999", "h\uff11", "h1:\u0663", "x" * 400],
)  # fmt: skip
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "h1:2", "-n", "3"], "3 ranks do not fit into 2 slots of 1 host"),
        (["--hosts", "h1:2", "-n", "2", "--min", "1", "--spares", "1"], "2 ranks and 1 spare do not fit"),
        (["--hosts", "h1:2", "-n", "1", "--min", "1", "--max", "3"], "3 ranks do not fit into 2 slots"),
        (["--hosts", "h1", "--hostfile", "x"], "expected one of them"),
        (["--hostfile", "/no/such"], "--hostfile /no/such: No such file"),
        (["--python", "x"], "needs --hosts"),
        (["--hosts", "h1", "--env", "SHOAL_NO_SUCH"], "--env SHOAL_NO_SUCH: there is no such variable"),
        (["--hosts", "-h1"], "'-h1' is not a host"),
        (["--nnodes", "2"], "for several hosts, use --hosts h1:4,h2:4"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", *arguments, "true"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_scale_uses_the_slots_of_all_hosts(far: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(far.path))  # no job but this one
    script = """
    if joins:
        join()
        print(os.environ["SHOAL_HOST_ID"], os.environ["SHOAL_LOCAL_RANK"], flush=True)
    tell("ready" + slot + os.environ["SHOAL_HOST_ID"])
    await_file("go")
    """
    (far.path / "script.py").write_text(RESPAWNED + textwrap.dedent(script))
    options = ["--hosts", "h1:2,h2:2", "-n", "2", "--min", "1", "--max", "4"]
    job = far.shoal("run", *options, "script.py")
    far.read("ready0h1"), far.read("ready1h1")
    assert far.end(far.shoal("scale", "4"))[1] == b"shoal: 4 ranks wanted: ranks 2, 3 start\n"
    far.read("ready0h2"), far.read("ready1h2")
    assert far.end(far.shoal("scale", "2"))[1] == b"shoal: 2 ranks wanted: ranks 2, 3 leave\n"
    assert job.stderr is not None
    left = b"".join(job.stderr.readline() for _ in range(4))
    assert b"shoal: rank 2 on h2 has left" in left
    assert b"shoal: rank 3 on h2 has left" in left
    (far.path / "go").touch()
    code, out, err = far.end(job)
    assert (code, sorted(out.splitlines()), err) == (0, [b"[2] h2 0", b"[3] h2 1"], b"")


def test_a_named_store_and_its_secret_are_passed_on(far: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    (far.path / "secret").write_text("fish\n")
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(far.path / "secret"))
    url = f"file://{far.path}/store"
    code, out, err = run(
        far,
        """
        from shoal import config
        print(os.environ["SHOAL_STORE"], config.secret().decode(), "SHOAL_SECRET_FILE" in os.environ)
        """,
        "--store",
        url,
        hosts="h1,localhost",
    )
    # The agent of this machine inherits all that the launcher has; SHOAL_SECRET comes before a file.
    assert (code, err) == (0, "")
    assert all(line[4:].startswith(f"{url} fish ") for line in out.splitlines())
    assert len(out.splitlines()) == 2


def test_a_secret_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"not \xff utf-8")
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(UsageError, match="SHOAL_SECRET is not UTF-8, and cannot be passed on to other hosts"):
        passed_on([], {}, store=True)
