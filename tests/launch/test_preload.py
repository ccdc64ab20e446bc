"""``shoal run --preload``: ranks are forked from a process that has imported modules."""

from __future__ import annotations

import os
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from shoal.errors import LaunchError
from shoal.launch.ranks import fork_server
from shoal.launch.ranks.guardian import Guardian
from tests.support.fake_ssh import fake_ssh
from tests.support.waiting import until

from .conftest import FILES, Workshop, alive
from .test_guardian import FAMILY

#: a module that counts its imports, in a file with a line for each
COUNTED = """
import os
with open("imports", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""

#: scripts with what Python does with them
PROGRAMS = {
    "a script": """
        print(sys.argv, sys.path[0], __name__, __file__, __spec__, __package__, __doc__, __cached__)
        print(type(__loader__).__name__, sorted(globals()), sys.modules["__main__"].rank == rank)
        print(repr(sys.stdin.read()), sys.stdout.line_buffering, sys.stderr.line_buffering)
        print(sys.stdout.seekable(), sys.stdin.seekable(), sys.stdin.name, sys.stdin.mode, sys.stdin.errors)
        print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
        import gc, threading
        print(len(os.listdir("/proc/self/fd")), threading.active_count(), gc.isenabled(), os.getcwd())
        """,
    "standard error": "print('one'); print('two', file=sys.stderr)",
    "the code of sys.exit": "import atexit; atexit.register(print, 'at exit'); sys.exit(7)",
    "a text of sys.exit": "sys.exit('that is all')",
    "an exception": "import json\ndef f(): json.loads('{')\nf()",
    "an exception with a cause": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise ValueError("x") from error
        """,
    "an exception and a hook": "sys.excepthook = lambda *error: print(error[1])\nraise ValueError('x')",
    "a syntax error": "x = = 1",
    "an interruption": """
        import atexit
        atexit.register(print, "at exit")
        os.kill(os.getpid(), signal.SIGINT)
        """,
    "cleanup after an interruption": """
        import logging.handlers
        class Resource:
            def __del__(self): print("deleted", flush=True)
        resource = Resource()
        target = logging.StreamHandler(sys.stdout)
        logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=target))
        logging.warning("written by logging.shutdown")
        raise KeyboardInterrupt
        """,
    "an object that is finalized at exit": """
        class Resource:
            def __del__(self): print("deleted", flush=True)
        resource = Resource()
        """,
    "a death": "os.kill(os.getpid(), signal.SIGKILL)",
    "an end without cleanup": "os._exit(3)",
    "a thread": """
        import threading
        threading.Timer(0.1, print, ["thread"]).start()
        """,
    "processes of its own": """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """,
}


def without_numbers(text: bytes) -> str:
    return re.sub(r"[0-9.]+ s|process [0-9]+", "-", text.decode())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_runs_as_it_does_without(workshop: Workshop, program: str) -> None:
    ends = []
    for options in ([], ["--preload", "decimal"]):
        code, out, err = workshop.run(program, ranks=1, options=options)
        ends.append((code, without_numbers(out), without_numbers(err)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("command", [["-m", "package.part", "x"], ["-m", "package", "x"], ["package", "x"]])
def test_a_module_and_a_directory_run_as_they_do_without(workshop: Workshop, command: list[str]) -> None:
    (workshop.path / "package").mkdir()
    text = "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __file__, __spec__.name)"
    for name in ("__init__", "__main__", "part"):
        (workshop.path / "package" / f"{name}.py").write_text(text if name != "__init__" else "")
    ends = [
        workshop.end(workshop.shoal("run", *options, *command)) for options in ([], ["--preload", "decimal"])
    ]
    assert ends[0] == ends[1]
    assert (ends[0][0], ends[0][2]) == (0, b"")


def test_other_files_run_as_they_do_without(workshop: Workshop) -> None:
    text = "import sys\nprint(sys.argv, sys.path[0], __name__, __file__, __spec__, type(__loader__).__name__)"
    (workshop.path / "far" / "away").mkdir(parents=True)
    (workshop.path / "link").symlink_to("far/away")
    (workshop.path / "far" / "script.py").write_text(text)
    py_compile.compile(str(workshop.path / "far" / "script.py"), str(workshop.path / "script.pyc"))
    with zipfile.ZipFile(workshop.path / "script.zip", "w") as archive:
        archive.writestr("__main__.py", text.replace("__spec__", "__spec__.name"))
    for command in (["script.zip", "x"], ["script.pyc", "x"], ["link/../script.py", "x"]):
        ends = [
            workshop.end(workshop.shoal("run", *options, *command))
            for options in ([], ["--preload", "decimal"])
        ]
        assert ends[0] == ends[1]
        assert (ends[0][0], ends[0][2]) == (0, b"")


def test_a_module_sees_the_command_and_may_change_the_directory(workshop: Workshop) -> None:
    (workshop.path / "seeing.py").write_text(
        "import __main__, os, sys\n"
        "seen = sys.argv, sys.orig_argv[1:], sys.path[0], __main__.__file__\n"
        "os.chdir('/')\n"
    )
    (workshop.path / "script.py").write_text("import os, seeing\nprint(seeing.seen, os.getcwd())")
    ends = [
        workshop.end(workshop.shoal("run", *options, "script.py", "x"))
        for options in ([], ["--preload", "seeing"])
    ]
    assert ends[0] == ends[1]
    assert ends[0][0] == 0


def test_ranks_share_one_import(workshop: Workshop) -> None:
    (workshop.path / "counted.py").write_text(COUNTED)
    code, out, err = workshop.run(
        """
        import counted
        print(rank, os.environ["SHOAL_SIZE"], os.getpid() == os.getpgid(0) == os.getsid(0))
        tell(f"pid{rank}", os.getpid())
        """,
        ranks=3, options=["--preload", "counted, decimal"],
    )  # fmt: skip
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[%d] %d 3 True" % (r, r) for r in range(3)]
    (server,) = (workshop.path / "imports").read_text().split()
    assert server not in {workshop.read(f"pid{rank}") for rank in range(3)}


def test_a_rank_that_replaces_another_does_not_import_again(workshop: Workshop) -> None:
    (workshop.path / "counted.py").write_text(COUNTED)
    (workshop.path / "script.py").write_text(
        FILES + "import counted\n"
        "if 'SHOAL_JOIN' in os.environ:\n"
        "    tell('joined', 'SHOAL_RANK' in os.environ)\n"
        "elif os.environ['SHOAL_RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "await_file('joined')\n"
    )
    options = ["-n", "2", "--min", "1", "--respawn", "--preload", "counted"]
    code, _, err = workshop.end(workshop.shoal("run", *options, "script.py"))
    assert code == 0, err
    assert workshop.read("joined") == "False"
    assert len((workshop.path / "imports").read_text().split()) == 1


def test_all_ranks_start_again_without_an_import(workshop: Workshop) -> None:
    (workshop.path / "counted.py").write_text(COUNTED)
    script = "import counted\nsys.exit(0 if os.environ['SHOAL_EPOCH'] == '2' else 5)"
    options = ["--max-restarts", "2", "--preload", "counted"]
    code, _, err = workshop.run(script, options=options)
    assert code == 0, err
    assert len((workshop.path / "imports").read_text().split()) == 1


def test_ranks_are_bound_to_cores_and_read_standard_input(workshop: Workshop) -> None:
    launcher = workshop.start(
        "print(sorted(os.sched_getaffinity(0)), repr(sys.stdin.read()))",
        options=["--preload", "decimal", "--bind"], stdin=subprocess.PIPE,
    )  # fmt: skip
    out, err = launcher.communicate(b"a line\n", timeout=240)
    assert (launcher.returncode, err) == (0, b"")
    first, second = sorted(out.decode().splitlines())
    assert first.endswith(r"'a line\n'")
    assert second.endswith("''")
    if len(os.sched_getaffinity(0)) > 1:
        assert first.split("]")[1] != second.split("]")[1]


def test_a_large_environment_arrives(workshop: Workshop) -> None:
    large = {f"VARIABLE_{number}": "é" * 60_000 for number in range(8)}
    code, out, err = workshop.run(
        "print(sum(len(v) for k, v in os.environ.items() if k.startswith('VARIABLE_')))",
        ranks=1, options=["--preload", "decimal"], env={**os.environ, **large, "OTHER": "\udce9"},
    )  # fmt: skip
    assert (code, out, err) == (0, b"[0] 480000\n", b"")


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("no_such_module", None, "no_such_module cannot be imported: ModuleNotFoundError: No module named"),
        ("wrong", "1 / 0", "wrong cannot be imported: ZeroDivisionError: division by zero"),
        ("leaving", "raise SystemExit(0)", "leaving cannot be imported: SystemExit: 0"),
        ("dying", "import os; os._exit(0)", "its process has ended"),
        (
            "threaded",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='Ticker').start()",
            "importing threaded starts threads, which forked ranks would not have: Ticker",
        ),
    ],
)
def test_no_rank_starts_if_a_module_cannot_be_imported(
    workshop: Workshop, module: str, text: str | None, expected: str
) -> None:
    if text is not None:
        (workshop.path / f"{module}.py").write_text(text)
    code, out, err = workshop.run("print('started')", options=["--preload", module])
    assert (code, out) == (2, b"")
    assert f"--preload {module}: {expected}" in err.decode()
    assert (f'{module}.py", line 1' in err.decode()) == (module in ("wrong", "leaving"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--preload", "a b", "script.py"], "expected names of modules, separated by commas; got 'a b'"),
        (["--preload", "", "script.py"], "expected names of modules"),
        (["--preload", "json", "/bin/true"], "--preload needs a Python script or module"),
        (["--preload", "json", sys.executable, "script.py"], "--preload needs a Python script or module"),
    ],
)
def test_options_that_do_not_fit_are_refused(workshop: Workshop, options: list[str], expected: str) -> None:
    (workshop.path / "script.py").write_text("")
    code, _, err = workshop.end(workshop.shoal("run", *options))
    assert code == 2
    assert expected in " ".join(err.decode().split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_import_ends_the_job(workshop: Workshop, number: signal.Signals) -> None:
    (workshop.path / "slow.py").write_text(FILES + "tell('server', os.getpid())\ntime.sleep(600)")
    launcher = workshop.start("print('started')", options=["--preload", "slow"])
    (server,) = workshop.pids("server")
    launcher.send_signal(number)
    code, out, _ = workshop.end(launcher)
    assert (code, out) == (128 + number, b"")
    assert not alive(server)


def test_signals_that_the_caller_ignores_change_nothing(workshop: Workshop) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    (workshop.path / "script.py").write_text(
        f"import signal\nprint([signal.getsignal(number) for number in {[*map(int, numbers)]}])\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    ends = []
    for options in ([], ["--preload", "decimal"]):
        argv = [sys.executable, "-m", "shoal", "run", *options, "script.py"]
        caller = (
            f"import os, signal\nfor each in {[*map(int, numbers)]}: signal.signal(each, signal.SIG_IGN)\n"
            f"os.execv({argv[0]!r}, {argv!r})"
        )
        ends.append(workshop.end(workshop.start_process([sys.executable, "-c", caller])))
    assert ends[0] == ends[1]
    assert (ends[0][0], ends[0][2]) == (0, b"")


def is_pending(pid: int, number: signal.Signals) -> bool:
    found = re.search(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def test_a_signal_before_the_program_runs_is_not_lost(workshop: Workshop) -> None:
    (workshop.path / "seeding.py").write_text(
        FILES + "import types\n"
        "def seed():\n"
        "    tell('rank', os.getpid())\n"
        "    await_file('go')\n"
        "sys.modules['numpy.random'] = types.SimpleNamespace(seed=seed)\n"
    )
    options = ["--preload", "seeding", "--grace", "5"]
    launcher = workshop.start("time.sleep(600)", ranks=1, options=options)
    (rank,) = workshop.pids("rank")
    launcher.send_signal(signal.SIGTERM)
    until(lambda: is_pending(rank, signal.SIGTERM))
    (workshop.path / "go").touch()
    code, _, err = workshop.end(launcher)
    assert code == 128 + signal.SIGTERM
    assert b"rank 0 was killed by SIGTERM" in err


def test_modules_may_ignore_signals_close_stdout_and_leave_processes(workshop: Workshop) -> None:
    (workshop.path / "rude.py").write_text(
        FILES + "import subprocess\n"
        "tell('left', subprocess.Popen(['sleep', '600']).pid)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "sys.stdout.close()\n"
        "os.close(0)\n"
    )
    code, _, err = workshop.run("import rude\nassert not sys.stdin.read()", options=["--preload", "rude"])
    assert (code, err) == (0, b"")
    (left,) = workshop.pids("left")
    until(lambda: not alive(left))


def test_a_module_may_fork(workshop: Workshop) -> None:
    (workshop.path / "forking.py").write_text("import os\nos.fork()")
    code, out, err = workshop.run("print('started')", ranks=1, options=["--preload", "forking"])
    assert (code, out, err) == (0, b"[0] started\n", b"")


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_input_seeks_as_it_does_without(workshop: Workshop, kind: str) -> None:
    (workshop.path / "input").write_text("a line\n")
    for options in ([], ["--preload", "decimal"]):
        with open(workshop.path / "input") as file:
            launcher = workshop.start(
                "print(sys.stdin.seekable(), sys.stdin.name, sys.stdin.readline())",
                ranks=1, options=options, stdin=file if kind == "file" else subprocess.PIPE,
            )  # fmt: skip
            out, err = launcher.communicate(b"a line\n" if kind == "pipe" else None, timeout=240)
        assert (launcher.returncode, err) == (0, b"")
        assert out.startswith(f"[0] {kind == 'file'} <stdin> a line\n".encode())


def test_the_launcher_does_not_wait_forever_for_a_stuck_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_FORK_TIMEOUT_S", 0.2)
    server = fork_server.ForkServer([sys.executable, "script.py"], ["decimal"], dict(os.environ))
    with closing(server), Guardian() as guardian:
        server.wait_ready()
        (process,) = (child for child in psutil.Process().children() if "script.py" in child.cmdline())
        process.suspend()
        with pytest.raises(LaunchError, match="has not forked a rank"):
            server.fork(guardian, None, {}, subprocess.DEVNULL, {})
        with pytest.raises(LaunchError, match="its process has ended"):
            server.fork(guardian, None, {}, subprocess.DEVNULL, {})


@pytest.mark.parametrize("both", [False, True])
def test_a_killed_launcher_leaves_neither_ranks_nor_the_server(workshop: Workshop, both: bool) -> None:
    launcher = workshop.start(FAMILY, options=["--preload", "decimal"], start_new_session=True)
    pids = workshop.pids("rank0", "rank1", "child0", "child1")
    children = [child.pid for child in psutil.Process(launcher.pid).children()]
    assert set(pids[:2]) < set(children)
    assert len(children) == 4  # with the guardian and the server
    if both:
        os.kill(pids[0], signal.SIGKILL)
    launcher.kill()
    until(lambda: not any(alive(pid) for pid in (*pids, *children)))


def test_ranks_live_on_without_the_server(workshop: Workshop) -> None:
    (workshop.path / "script.py").write_text(
        FILES + "if 'SHOAL_JOIN' in os.environ or os.environ['SHOAL_RANK'] == '0':\n"
        "    tell('rank0', os.getpid())\n"
        "    await_file('end')\n"
        "else:\n"
        "    tell('rank1', os.getpid())\n"
        "    time.sleep(600)\n"
    )
    options = ["-n", "2", "--min", "1", "--respawn", "--preload", "decimal"]
    launcher = workshop.shoal("run", *options, "script.py")
    ranks = workshop.pids("rank0", "rank1")
    (server,) = (
        child.pid
        for child in psutil.Process(launcher.pid).children()
        if child.pid not in ranks and any("fork_server" in word for word in child.cmdline())
    )
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(server))
    os.kill(ranks[1], signal.SIGKILL)
    until(lambda: not alive(ranks[1]))
    (workshop.path / "end").touch()
    code, _, err = workshop.end(launcher)
    assert code == 0, err


TRAINING = """
import numpy, random, torch
import shoal
print(torch.initial_seed(), float(torch.rand(())), numpy.random.rand(), random.random())
with shoal.init() as group:
    group.all_reduce(torch.ones(3)).wait()
"""


def test_ranks_work_together_report_to_the_launcher_and_draw_different_numbers(workshop: Workshop) -> None:
    options = ["--preload", "torch,numpy,shoal", "--no-prefix", "--summary"]
    code, out, err = workshop.run(TRAINING, options=options)
    assert code == 0
    first, second = (line.split() for line in out.decode().splitlines())
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert b"no rank has reported" not in err
    assert re.search(rb"shoal: +1 +1 ", err)  # one operation of rank 1


# -- on other hosts ------------------------------------------------------------------------------


@pytest.fixture
def far(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A workshop whose launchers reach any host."""
    monkeypatch.setenv("SHOAL_SSH", fake_ssh(workshop.path))
    return workshop


HOSTS = ["run", "--hosts", "h1:2,h2:2"]


def test_each_host_imports_once(far: Workshop) -> None:
    (far.path / "counted.py").write_text(COUNTED)
    (far.path / "script.py").write_text("import counted, os\nprint(os.environ['SHOAL_RANK'], flush=True)\n")
    code, out, err = far.end(far.shoal(*HOSTS, "--preload", "counted", "script.py"))
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[%d] %d" % (r, r) for r in range(4)]
    assert len((far.path / "imports").read_text().split()) == 2


def test_a_host_that_cannot_import_is_named(far: Workshop) -> None:
    (far.path / "script.py").write_text("")
    code, _, err = far.end(far.shoal(*HOSTS, "--preload", "no_such_module", "script.py"))
    assert code == 1
    assert re.search(r"h[12].*no_such_module cannot be imported: ModuleNotFoundError", err.decode())


def test_a_signal_during_the_import_of_hosts_ends_the_job(far: Workshop) -> None:
    (far.path / "slow.py").write_text(FILES + "open(f'server-{os.getpid()}', 'w').close()\ntime.sleep(600)")
    (far.path / "script.py").write_text("")
    launcher = far.shoal(*HOSTS, "--preload", "slow", "script.py")
    until(lambda: len(list(far.path.glob("server-*"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    code, _, _ = far.end(launcher)
    assert code == 128 + signal.SIGTERM
    servers = [int(path.name.partition("-")[2]) for path in far.path.glob("server-*")]
    until(lambda: not any(map(alive, servers)))
