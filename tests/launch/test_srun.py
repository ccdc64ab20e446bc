"""``shoal run --srun``, with a program in the place of srun that runs the agents on this machine."""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from shoal.errors import LaunchError
from shoal.launch.cli import invoke
from shoal.launch.job.signals import Signals
from shoal.launch.remote.callback import PURPOSE, StepSignalFilter
from shoal.launch.remote.hosts import Host
from shoal.launch.slurm import agent_pool as srun_agent_pool
from shoal.launch.slurm.agent_pool import SrunAgentPool
from shoal.launch.slurm.srun import Srun
from shoal.net.handshake import Handshake
from tests.support.fake_srun import fake_srun
from tests.support.waiting import until

from .conftest import PRELUDE, Workshop, alive
from .test_hosts import marked


@pytest.fixture
def cluster(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    """A workshop in an allocation; nothing of a job is left after the test."""
    monkeypatch.setenv("PATH", f"{fake_srun(workshop.path)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SHOAL_TEST_MARK", str(workshop.path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    yield workshop
    workshop.close()
    until(lambda: not marked(workshop.path), lambda: marked(workshop.path))


def start(
    cluster: Workshop, script: str, *options: str, nodes: str = "h1,h2", tasks: str = "2(x2)", **more: str
) -> subprocess.Popen[bytes]:
    (cluster.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    given = {**os.environ, "SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks, **more}
    return cluster.shoal("run", "--srun", *options, "script.py", env=given)


def run(
    cluster: Workshop, script: str, *options: str, nodes: str = "h1,h2", tasks: str = "2(x2)", **more: str
) -> tuple[int, str, str]:
    code, out, err = cluster.end(start(cluster, script, *options, nodes=nodes, tasks=tasks, **more))
    return code, out.decode(), err.decode()


def test_ranks_are_those_of_the_nodes_and_know_the_restarts_of_the_job(cluster: Workshop) -> None:
    code, out, err = run(
        cluster,
        """
        names = ("HOST_ID", "LOCAL_RANK", "LOCAL_SIZE", "SIZE", "EPOCH")
        print(*(os.environ["SHOAL_" + name] for name in names), os.getcwd(), os.environ["SLURMD_NODENAME"])
        """,
        nodes="h[1-3]",
        tasks="2,1(x2)",
        SLURM_RESTART_COUNT="3",
    )
    places = ["h1 0 2", "h1 1 2", "h2 0 1", "h3 0 1"]
    expected = [f"[{rank}] {each} 4 3 {cluster.path} {each[:2]}" for rank, each in enumerate(places)]
    assert (code, sorted(out.splitlines()), err) == (0, expected, "")


def test_fewer_ranks_than_slots_leave_nodes_unused(cluster: Workshop) -> None:
    code, out, err = run(
        cluster, "print(os.environ['SHOAL_HOST_ID'])", "-n", "2", nodes="h1,h2,deaf", tasks="1(x3)"
    )
    assert (code, sorted(out.splitlines()), err) == (0, ["[0] h1", "[1] h2"], "")
    code, _, err = run(cluster, "", "-n", "5")
    assert (code, err) == (2, "shoal: 5 ranks do not fit into 4 slots of 2 hosts\n")


def test_ranks_find_the_secret_of_their_job_and_nothing_that_speaks_of_the_agent(cluster: Workshop) -> None:
    code, out, err = run(
        cluster,
        """
        import psutil
        agent = psutil.Process(os.getppid())
        mine, its = os.environ["SHOAL_SECRET"], agent.environ()["SHOAL_SECRET"]
        shown = [mine in word or its in word for each in psutil.process_iter(["cmdline"])
                 for word in each.info["cmdline"] or ()]
        print(mine != its, any(shown), *(os.environ.get(n) for n in ("SLURM_PROCID", "SLURM_NTASKS", "FISH")))
        """,
        nodes="h1",
        tasks="1",
        FISH="herring",
    )
    assert (code, out, err) == (0, "[0] True False None None herring\n", "")


@pytest.mark.parametrize("who", [0, 3])
def test_the_exit_code_is_that_of_the_rank_that_failed_whose_node_is_named(
    cluster: Workshop, who: int
) -> None:
    code, _, err = run(
        cluster,
        f"""
        if rank == {who}:
            sys.exit("no such fish")
        await_signal()
        """,
    )
    assert code == 1
    assert f"shoal: rank {who} on {'h1' if who < 2 else 'h2'} failed first: exit code 1" in err
    assert err.endswith("  | no such fish\n")


def test_rank_0_reads_what_the_launcher_reads_and_the_output_of_all_is_whole(cluster: Workshop) -> None:
    (cluster.path / "script.py").write_text(PRELUDE + "print(sys.stdin.read() * 1000, end='')\n")
    given = {**os.environ, "SLURM_JOB_NODELIST": "h1,h2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    process = cluster.shoal("run", "--srun", "script.py", env=given, stdin=subprocess.PIPE)
    out, err = process.communicate(b"herring\n" * 1000, timeout=240)
    assert (process.returncode, err) == (0, b"")
    assert out == b"[0] herring\n" * 1_000_000


_LASTING = """
tell(f"pid-{rank}", os.getpid())
tell(f"agent-{rank}", os.getppid())
print("runs", flush=True)
"""


def lasting(cluster: Workshop, end: str, *options: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A job of four ranks, whose numbers of processes are given once the launcher has heard them all."""
    process = start(cluster, _LASTING + end, "--log-dir", "logs", *options)
    files = [cluster.path / "logs" / f"rank{rank}.log" for rank in range(4)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return process, cluster.pids("pid-0", "pid-1", "pid-2", "pid-3")


def test_the_others_go_on_with_min_when_an_agent_is_killed(cluster: Workshop) -> None:
    process, pids = lasting(cluster, "await_file('go') if rank < 2 else await_signal()", "--min", "2")
    os.kill(cluster.pids("agent-2")[0], signal.SIGKILL)
    until(lambda: not alive(pids[2]) and not alive(pids[3]))
    (cluster.path / "go").touch()
    code, _, err = cluster.end(process)
    assert code == 0, err
    assert b"shoal: host h2 is lost, and with it ranks 2, 3: " in err
    assert b"2 of 4 ranks finished" in err


def test_when_an_agent_is_killed_its_host_is_lost_and_all_ends(cluster: Workshop) -> None:
    process, _ = lasting(cluster, "await_signal()")
    os.kill(cluster.pids("agent-2")[0], signal.SIGKILL)
    code, _, err = cluster.end(process)
    assert code == 74, err
    assert b"shoal: host h2 is lost" in err


@pytest.mark.parametrize("who", ["head", "srun"])
def test_nothing_is_left_when_it_is_killed(cluster: Workshop, who: str) -> None:
    process, pids = lasting(cluster, "await_signal()")
    os.kill(process.pid if who == "head" else cluster.pids("srun.pid")[0], signal.SIGKILL)
    code, _, err = cluster.end(process)
    if who == "srun":
        assert code == 74
        assert b"the connection has ended; srun ended with exit code 137" in err
    until(lambda: not any(map(alive, pids)))
    until(lambda: not marked(cluster.path), lambda: marked(cluster.path))


def test_a_signal_to_the_launcher_is_passed_on(cluster: Workshop) -> None:
    script = """
    signal.signal(signal.SIGUSR1, lambda *_: tell(f"heard-{rank}"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tell(f"ready-{rank}")
    await_signal()
    """
    process = start(cluster, script, tasks="1(x2)")
    [cluster.read(f"ready-{rank}") for rank in range(2)]
    process.send_signal(signal.SIGUSR1)
    [cluster.read(f"heard-{rank}") for rank in range(2)]
    process.send_signal(signal.SIGTERM)
    assert cluster.end(process)[0] == 0


def test_a_signal_that_slurm_sends_to_all_reaches_a_rank_once(cluster: Workshop) -> None:
    script = """
    def heard(number, frame):
        global count
        count += 1
        if count == 2:
            tell("twice")
        tell(f"heard-{count}")
    count = 0
    signal.signal(signal.SIGTERM, heard)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(count))
    tell("agent-0", os.getppid())
    tell("pid-0", os.getpid())
    await_signal()
    """
    process = start(cluster, script, nodes="h1", tasks="1")
    agent, rank = cluster.pids("agent-0", "pid-0")
    os.kill(agent, signal.SIGTERM)
    os.kill(rank, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    cluster.read("heard-1")
    process.send_signal(signal.SIGUSR1)  # comes after the order to send SIGTERM
    code, _, err = cluster.end(process)
    assert (code, "twice" in os.listdir(cluster.path)) == (143, False), err


def test_srun_and_the_last_connection_may_end_in_the_same_moment() -> None:
    srun = Srun(["sh", "-c", "exit 3"], os.environ)
    with selectors.DefaultSelector() as selector:
        srun.watch(selector)
        until(lambda: srun.code == 3)
        ready = selector.select(0)
        srun.watch(None)
        assert ready
        for key, _ in ready:
            key.data()
    srun.end()


def test_an_agent_tells_what_it_was_sent_just_now() -> None:
    with StepSignalFilter() as told:
        assert not told(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told(signal.SIGUSR1)
        assert not told(signal.SIGTERM)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            "closed",
            "shoal: host closed: srun ended with exit code 1 before an agent had connected from there\n"
            "output of srun:\n"
            "  | srun: error: Unable to create step for job 7: Job/step already completing\n",
        ),
        (
            "h1,broken",
            "shoal: host broken: its agent ended before it had connected: Exited with exit code 127\n"
            "output of srun:\n  | srun: error: broken: task 1: Exited with exit code 127\n",
        ),
        ("h1,old", "shoal: host old: it runs shoal 9.9 (agents' protocol"),
    ],
)
def test_when_the_agents_do_not_start_nothing_runs_and_srun_is_heard(
    cluster: Workshop, nodes: str, words: str
) -> None:
    code, out, err = run(cluster, "print('runs')", nodes=nodes, tasks="1" + "(x2)" * ("," in nodes))
    assert (code, out) == (1, "")
    assert err.startswith(words)


def _pool(cluster: Workshop, monkeypatch: pytest.MonkeyPatch, *names: str) -> str:
    """The error of a fleet that misses agents; its time begins when one has called."""
    monkeypatch.chdir(cluster.path)
    hosts = [Host(name, 1, number) for number, name in enumerate(names)]
    with Signals() as signals:
        pool = SrunAgentPool(hosts, sys.executable, signals, hidden=())
        try:
            listener = pool._acceptor._listener
            until(lambda: select.select([listener], [], [], 0)[0])
            with pytest.raises(LaunchError) as caught:
                pool.connect()
        finally:
            for pid, words in marked(cluster.path):
                if words == ["sleep", "600"]:
                    os.kill(pid, signal.SIGKILL)
            pool.close()
    return str(caught.value)


def test_an_agent_that_never_calls_is_named_in_time(
    cluster: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srun_agent_pool, "START_TIMEOUT_S", 5.0)
    stderr_tail = _pool(cluster, monkeypatch, "h1", "deaf")
    assert re.match(
        r"host deaf: its agent has not connected in 5 s; agents connect to port [0-9]+ of this machine; set "
        "SHOAL_INTERFACE for another address",
        stderr_tail,
    ), stderr_tail


@pytest.mark.parametrize(
    ("names", "missing", "why"),
    [
        (("h1", "twin"), "host twin", "one has connected from there already"),
        (("twin", "h2"), "hosts? .*twin.*", "the job has no ranks there"),
    ],
)
def test_an_agent_that_claims_another_node_ends_the_start(
    cluster: Workshop, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], missing: str, why: str
) -> None:
    stderr_tail = _pool(cluster, monkeypatch, *names)
    words = f"{missing}: no agent has connected from there; one reports node h1, but {why}"
    assert re.fullmatch(words, stderr_tail), stderr_tail


def test_a_stranger_without_the_secret_is_passed_over(cluster: Workshop) -> None:
    """It finds the launcher's port, as anybody on the network may, while one agent is still missing."""
    process = start(cluster, "print('runs')", nodes="h1,deaf", tasks="1(x2)")
    command = until(
        lambda: next((w for _, w in marked(cluster.path) if "agent" in w and "--connect" in w), None)
    )
    assert command is not None
    port = int(command[-1].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
        stranger.sendall(Handshake(connecting=True, secret=b"guessed", purpose=PURPOSE).greeting)
        stranger.sendall(bytes(4096))
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert cluster.end(process)[0] == 143
    for pid, words in marked(cluster.path):
        if words == ["sleep", "600"]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--srun", "--hosts", "h1", "x.py"], "--srun takes the hosts of the allocation: leave out --hosts"),
        (["--srun", "x.py"], "--srun must run in a Slurm allocation, but SLURM_JOB_ID is not set"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert invoke(["run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_srun_on_the_path_that_is_said(cluster: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run(cluster, "")
    assert (code, err) == (
        2,
        "shoal: --srun: srun was not found on PATH: run it on a machine with Slurm\n",
    )


def test_a_dry_run_prints_the_command_of_srun_and_no_secret(
    cluster: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "hush")
    code, out, err = run(cluster, "", "--dry-run")
    assert (code, err) == (0, "")
    assert re.search(r"^srun --nodes=2 --ntasks=2 --nodelist=h1,h2 .* agent --connect ':<port>'$", out, re.M)
    assert "host h2:\n  rank 2: " in out
    assert "hush" not in out
