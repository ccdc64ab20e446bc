"""The command line of ``shoal run``, and what ranks find when they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LaunchError
from shoal.launch.cli import COMMANDS, invoke
from shoal.launch.output.line_format import LineFormat
from shoal.launch.ranks.environment import default_variables, divide_cores, usable_cores
from shoal.launch.ranks.program import flaw_of_script, resolve
from shoal.net import build_version

from .conftest import Workshop


def test_a_rank_finds_its_place_in_the_environment(workshop: Workshop) -> None:
    code, out, _ = workshop.run(
        """
        names = ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK", "EPOCH")
        print(*(os.environ["SHOAL_" + name] for name in names))
        """,
        ranks=3,
    )
    assert code == 0
    assert sorted(out.splitlines()) == [b"[%d] 3 %d 3 %d 0" % (r, r, r) for r in range(3)]


def test_ranks_reach_the_launchers_store_which_knows_the_size(workshop: Workshop) -> None:
    code, out, err = workshop.run(
        """
        from shoal import config
        from shoal.rendezvous import job_record
        from shoal.store import open_store
        with open_store(config.STORE.get(), secret=config.secret(), timeout=30) as store:
            store.add("arrivals", 1)
            ((key, value),) = job_record(2, config.JOB.get()).items()
            print(store.get(key) == value)
        """
    )
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[0] True", b"[1] True"]


def test_ranks_meet_as_torch_distributed_does_at_a_port_kept_for_them(workshop: Workshop) -> None:
    """The place of a rank under torchrun's names, and a port that nobody else was given."""
    code, out, err = workshop.run(
        """
        import socket
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == os.environ["SHOAL_RANK"]
        assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            server = socket.create_server(place)
            tell("listening")
            peer, _ = server.accept()
            print(peer.recv(5).decode())
        else:
            await_file("listening")
            socket.create_connection(place).send(b"hello")
        """
    )
    assert (code, out, err) == (0, b"[0] hello\n", b"")


def test_the_secret_is_new_each_time_and_on_no_command_line(workshop: Workshop) -> None:
    script = """
        secret = os.environ["SHOAL_SECRET"]
        lines = []
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                try:
                    lines.append(open(f"/proc/{pid}/cmdline", errors="replace").read())
                except OSError:
                    pass
        assert lines and not any(secret in line for line in lines)
        print(secret)
        """
    first, second = workshop.run(script, ranks=1), workshop.run(script, ranks=1)
    assert first[0] == second[0] == 0
    assert len(first[1].strip()) == len(b"[0] ") + 64
    assert first[1] != second[1]


def test_stdin_goes_to_rank_0_and_the_others_see_its_end(workshop: Workshop) -> None:
    launcher = workshop.start("print(sys.stdin.read())", ranks=3, stdin=subprocess.PIPE)
    out, _ = launcher.communicate(b"for the first", timeout=60)
    assert sorted(out.splitlines()) == [b"[0] for the first", b"[1] ", b"[2] "]
    assert launcher.returncode == 0


def test_arguments_of_the_script_are_passed_on_untouched(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text("import sys; print(sys.argv[1:])")
    arguments = ["-n", "3", "--dry-run", "--", "-m", "a b", "--help"]
    for separator in ([], ["--"]):
        code, out, _ = workshop.end(workshop.shoal("run", *separator, "script.py", *arguments))
        assert (code, out.decode()) == (0, f"[0] {arguments}\n")


def test_a_module_is_run_as_python_does(workshop: Workshop) -> None:
    (workshop.path / "fish.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code, out, _ = workshop.end(workshop.shoal("run", "-m", "fish", "-n", "3"))
    assert (code, out) == (0, b"[0] __main__ ['-n', '3']\n")


def test_a_dry_run_prints_environment_and_commands_but_runs_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (workshop.path / "script.py").write_text("open('ran', 'w')")
    code, out, err = workshop.end(workshop.shoal("run", "-n", "2", "--dry-run", "script.py", "--name", "a b"))
    text = out.decode()
    assert (code, err) == (0, b"")
    assert "SHOAL_SECRET=<secret>\n" in text
    assert "OMP_NUM_THREADS=" in text
    assert "SHOAL_REPORT_FD=<descriptor>\n" in text
    for rank in (0, 1):
        line = next(line for line in text.splitlines() if line.startswith(f"rank {rank}: "))
        assert f"SHOAL_RANK={rank} " in line
        assert line.endswith(f"{sys.executable} script.py --name 'a b'")
    assert not (workshop.path / "ran").exists()


def test_a_variable_that_cannot_be_right_is_refused_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_RANK", "many")  # the launcher sets it anew
    assert invoke(["run", "--dry-run", "true"]) == 0
    monkeypatch.setenv("SHOAL_TIMEOUT", "soon")
    assert invoke(["run", "true"]) == 2
    assert capsys.readouterr().err == "shoal: SHOAL_TIMEOUT='soon': expected a positive number of seconds\n"


def test_the_directory_and_variables_of_mpiexec_work_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "program.py").write_text("import os; print(os.environ['OWN'], os.getcwd())")
    monkeypatch.chdir(tmp_path)  # restored at the end
    monkeypatch.setenv("OWN", "of this shell")
    assert invoke(["run", "-x", "OWN", "-wdir", "elsewhere", "--log-dir", "logs", "program.py", ":"]) == 0
    assert capfd.readouterr().out == f"[0] of this shell {tmp_path}/elsewhere\n"
    assert (tmp_path / "logs" / "rank0.log").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-n", "2", "absent.py"], "absent.py: no such script"),
        (["run", "-n", "2", "absent-program"], "absent-program: no such script"),
        (["run", "-n", "2", "./absent/program"], "./absent/program: no such script"),
        (["run", "-n", "0", "x.py"], "'-n'"),
        (["run", "-n", "many", "x.py"], "'-n'"),
        (["run", "-np", "0", "x.py"], "'-n'"),
        (["run", "--nproc-per-node=2", "--hosts=h1:2", "x.py"], "is another name of -n for a single machine"),
        (["run", "--nproc-per-node=2", "-n", "2", "x.py"], "is another name of -n for a single machine"),
        (["run", "--bind_to=core", "x.py"], "--bind-to; use --bind to bind ranks to cores"),
        (["run", "--label", "x.py"], "--label; not needed: lines are prefixed with the rank"),
        (["run", "--nnodes=1", "x.py"], "for several hosts, use --hosts h1:4,h2:4"),
        (["run", "-ppn", "2", "x.py"], "-ppn; give each host its number of ranks: --hosts h1:4,h2:4"),
        (["run", "-l", "x.py"], "-l; not needed: lines are prefixed"),
        (["run", "-genv", "A", "1", "x.py"], "-genv; write NAME=VALUE before shoal run"),
        (["run", "--oversubscribe", "x.py"], "--oversubscribe; not needed"),
        (["run", "--timeout=9", "x.py"], "--timeout; use timeout of coreutils"),
        (["run", "-q", "true", "-quiet"], "-q"),
        (["run", "-n", "1", "true", ":", "-n", "2", "true"], "':' starts another program with mpiexec"),
        (["run", "-x", "SHOAL_NO_SUCH", "true"], "--env SHOAL_NO_SUCH: there is no such variable"),
        (["run", "--wdir", "/no/such", "true"], "--chdir /no/such: No such file or directory"),
        (["run", "--log-dir", "/dev/null/logs", "x.sh"], "x.sh: no such script"),
        (["run", "--log-dir", "/dev/null/logs", "true"], "--log-dir /dev/null/logs: "),
        (["run", "--no-prefix", "--collapse", "true"], "--collapse needs the prefix, which names the ranks"),
        (["run"], "COMMAND"),
        (["run", "--fast", "x.py"], "--fast"),
        (["swim"], "swim"),
        (["store", "--listen", "nowhere"], "shoal: "),
        (["store", "--size", "0"], "'--size'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("foreign", "own"),
    [
        ("-np 2", "-n 2"),
        ("--np=2", "-n 2"),
        ("--nproc-per-node=2", "-n 2"),
        ("--nproc_per_node 2 --max_restarts 1", "-n 2 --max-restarts 1"),
        ("--num_processes 2 --module", "-n 2 -m"),
        ("--ntasks 2", "-n 2"),
        ("-H localhost:2 --wdir / -x PATH", "--hosts localhost:2 --chdir / --env PATH"),
        ("--host localhost:2 --log_directory logs", "--hosts localhost:2 --log-dir logs"),
    ],
)
def test_names_of_options_of_other_launchers_are_accepted(
    foreign: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", *foreign.split(), "--dry-run", "true"]) == 0
    found = capsys.readouterr().out
    assert invoke(["run", *own.split(), "--dry-run", "true"]) == 0
    assert found == capsys.readouterr().out


def test_a_program_that_cannot_be_executed_is_one_line_and_code_2(workshop: Workshop) -> None:
    program = workshop.path / "program"
    program.write_bytes(b"\x00not a program")
    program.chmod(0o755)
    code, out, err = workshop.end(workshop.shoal("run", "-n", "2", "./program"))
    assert (code, out) == (2, b"")
    assert err.startswith(b"shoal: rank 0 could not be started: ")
    assert err.count(b"\n") == 1


SCRIPTS = {
    "#!/nowhere/sh\n": "its first line names the interpreter /nowhere/sh, which does not exist",
    "#!/bin/sh\r\n": "its first line ends with CRLF, and the carriage return becomes part of",
    "#!/usr/bin/env sh\r\n": "its first line ends with CRLF, and the carriage return becomes part of",
    "#!/usr/bin/env no-such-sh\n": "its first line names the interpreter no-such-sh, which is not on PATH",
    "echo hello\n": "Exec format error: it is a script without a #! line, or a program for another processor",
}


@pytest.mark.parametrize("first_line", SCRIPTS)
def test_a_script_whose_interpreter_cannot_be_used_says_so(workshop: Workshop, first_line: str) -> None:
    program = workshop.path / "program"
    program.write_bytes(first_line.encode())
    program.chmod(0o755)
    code, out, err = workshop.end(workshop.shoal("run", "./program"))
    assert (code, out) == (2, b"")
    told = f"shoal: rank 0 could not be started: {program}: {SCRIPTS[first_line]}"
    assert err.decode().startswith(told), err
    assert err.count(b"\n") == 1


def test_scripts_whose_first_line_is_right_are_started(workshop: Workshop) -> None:
    for first_line in ("#!/bin/sh", "#!/bin/sh -e", "#! /usr/bin/env sh", "#!/usr/bin/env -S A=1 sh"):
        assert flaw_of_script_with(workshop, first_line) == "", first_line
    assert flaw_of_script(sys.executable, os.environ) == ""


def flaw_of_script_with(workshop: Workshop, first_line: str) -> str:
    program = workshop.path / "program"
    program.write_text(f"{first_line}\necho hello\n")
    return flaw_of_script(str(program), os.environ)


def test_a_loopback_interface_that_is_down_is_named(workshop: Workshop) -> None:
    isolated = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network without loopback needs user namespaces")
    (workshop.path / "script.py").write_text(
        "import shoal.rendezvous as r; r.rendezvous('tcp://127.0.0.1:9')"
    )
    trouble = "the loopback interface of this machine does not work (Network is unreachable)"
    python = [*isolated, sys.executable]
    code, _, err = workshop.end(workshop.start_process([*python, "-m", "shoal", "run", "script.py"]))
    assert (code, err.decode().startswith(f"shoal: {trouble}")) == (2, True), err
    code, _, err = workshop.end(workshop.start_process([*python, "script.py"]))
    assert code == 1
    assert f"RendezvousError: rendezvous at 127.0.0.1:9: {trouble}" in err.decode()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out == f"shoal {build_version()}\n"


def test_auto_is_a_rank_on_each_core_that_may_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "-n", "auto", "--dry-run", "true"]) == 0
    assert f"SHOAL_SIZE={len(os.sched_getaffinity(0))}\n" in capsys.readouterr().out


def test_bound_ranks_run_on_their_own_cores(workshop: Workshop) -> None:
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    (workshop.path / "script.py").write_text(show)
    cores = usable_cores()
    for size in (2, len(cores) + 1):
        launcher = workshop.shoal("run", "--bind", "--no-prefix", "-n", str(size), "script.py")
        code, out, err = workshop.end(launcher)
        assert (code, err) == (0, b"")
        expected = [str(sorted(share)) for share in divide_cores(cores, size)]
        assert sorted(out.decode().splitlines()) == sorted(expected)


@given(st.integers(1, 70), st.integers(1, 70))
def test_cores_are_dealt_out_evenly_and_shared_only_if_they_must_be(count: int, size: int) -> None:
    dealt = divide_cores(range(count), size)
    used = [core for share in dealt for core in share]
    lengths = {len(share) for share in dealt}
    assert len(dealt) == size
    assert max(lengths) - min(lengths) <= 1
    assert set(used) == set(range(min(count, size)) if count < size else range(count))
    assert count < size or len(used) == count


def test_the_shell_completes_commands_options_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(*words: str) -> str:
        line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        environment = {**os.environ, **line, "_SHOAL_COMPLETE": "bash_complete"}
        command = [sys.executable, "-c", "from shoal.launch.cli import main; main()"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert completed("shoal", "ru") == "plain,run\n"
    assert completed("shoal", "run", "--lo") == "plain,--log-dir\n"
    assert completed("shoal", "run", "-n", "2", "tr") == "file,tr\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([]) == 0
    listing = capsys.readouterr().out
    assert all(f"\n  {name} " in listing for name in COMMANDS)


def test_what_a_command_line_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("a.py", 0o755), ("data", 0o644), ("tool", 0o755)):
        Path(name).touch()
        Path(name).chmod(mode)
    Path("package").mkdir()
    python = sys.executable
    assert resolve(["a.py", "-x"], module=False) == [python, "a.py", "-x"]
    assert resolve(["data"], module=False) == [python, "data"]
    assert resolve(["package"], module=False) == [python, "package"]
    assert resolve(["tool", "1"], module=False) == [str(tmp_path / "tool"), "1"]
    assert os.path.basename(resolve(["sh"], module=False)[0]) == "sh"
    assert resolve(["a.b", "-x"], module=True) == [python, "-m", "a.b", "-x"]
    with pytest.raises(LaunchError, match="needs -m"):
        resolve(["a.b"], module=False)


def test_cores_are_shared_between_ranks_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert default_variables(3, {}, None)["OMP_NUM_THREADS"] == "2"
    assert default_variables(100, {}, None)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in default_variables(2, {"OMP_NUM_THREADS": "5"}, None)


def test_colours_are_not_forced_on_who_does_not_want_them() -> None:
    size = os.terminal_size((80, 24))
    assert default_variables(2, {}, size)["FORCE_COLOR"] == "1"
    assert "FORCE_COLOR" not in default_variables(2, {"NO_COLOR": "1"}, size)
    assert "FORCE_COLOR" not in default_variables(2, {}, None)


def test_lines_without_prefixes_are_as_wide_as_the_terminal() -> None:
    size = os.terminal_size((80, 24))
    assert default_variables(2, {}, size, prefix_width=LineFormat().width(2))["COLUMNS"] == "76"
    assert default_variables(2, {}, size)["COLUMNS"] == "80"


def test_the_launcher_does_not_import_torch() -> None:
    code = "import sys, shoal.launch.commands.run, shoal.launch.commands.store; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_a_launcher_without_standard_files_runs_its_ranks(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text("print('into the void'); open('ran', 'w')")
    command = f"exec {sys.executable} -m shoal run script.py <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=workshop.path, timeout=60, check=False).returncode == 0
    assert (workshop.path / "ran").exists()


def test_a_launcher_that_inherits_an_ignored_sigchld_sees_exits(workshop: Workshop) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    assert workshop.run("sys.exit(9)", preexec_fn=ignore)[0] == 9


def test_a_run_leaves_no_descriptor_thread_or_child_in_its_process(workshop: Workshop) -> None:
    script = workshop.path / "twice.py"
    script.write_text(
        "import os, threading\n"
        "from shoal.launch.commands.run import launch\n"
        "from shoal.launch.job.launch import LaunchOptions\n"
        "from shoal.launch.ranks.environment import Job\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        "assert launch(['sh', '-c', 'exit $SHOAL_RANK'], Job(2), {}, LaunchOptions()) == 1\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
        "assert threading.active_count() == 1\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: print('clean')\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, check=False)
    assert result.stdout == b"clean\n"
