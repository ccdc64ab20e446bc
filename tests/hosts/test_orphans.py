"""Whatever part of the launcher is killed, no process of the job is left on any host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.support.machines import LONG
from tests.support.ssh_hosts import HEAD, SshHosts
from tests.support.waiting import until

from .conftest import script

#: each rank has a child in its group; both would sleep on
FAMILY = """
print("runs", flush=True)
if os.fork() == 0:
    time.sleep(600)
tell(f"told-{rank}")
time.sleep(600)
"""

#: who is killed: on which host, and words of its command line
PARTS: dict[str, Callable[[SshHosts, subprocess.Popen[bytes]], int]] = {
    "head": lambda hosts, head: head.pid,
    "ssh client": lambda hosts, head: hosts.find(HEAD, "ssh -F", " b exec "),
    "sshd session": lambda hosts, head: hosts.find("b", "sshd: root@notty"),
    "agent": lambda hosts, head: hosts.find("b", "agent --stdio"),
}


def started(hosts: SshHosts, *options: str) -> subprocess.Popen[bytes]:
    """A job whose launcher has heard all of its ranks."""
    shutil.rmtree(logs := hosts.folder / "logs", ignore_errors=True)
    head = hosts.start("run", "--hosts", "a:2,b:2", "--log-dir", "logs", *options, script(hosts, FAMILY))
    hosts.await_told(*range(4))
    files = [logs / f"rank{rank}.log" for rank in range(4)]
    until(lambda: all(file.exists() and file.read_text() for file in files), patience=LONG)
    return head


@pytest.mark.parametrize("part", PARTS)
def test_nothing_outlives_a_part_that_is_killed(hosts: SshHosts, part: str) -> None:
    head = started(hosts)
    os.kill(PARTS[part](hosts, head), signal.SIGKILL)
    _, err = head.communicate(timeout=60)
    hosts.await_empty()
    if part != "head":
        assert head.returncode == 74
        text = err.decode()
        assert "shoal: host b is lost, and with it ranks 2, 3: the connection has ended; " in text
        assert "on b failed first: its host was lost" in text


def test_a_job_survives_the_loss_of_a_guardian_and_ends_in_order(hosts: SshHosts) -> None:
    head = started(hosts)
    os.kill(hosts.find("b", "guardian.py"), signal.SIGKILL)
    head.send_signal(signal.SIGTERM)
    _, err = head.communicate(timeout=60)
    assert (head.returncode, err) == (143, b"shoal: stopped by SIGTERM: ranks 0-3 were killed by SIGTERM\n")


def test_agent_and_guardian_killed_together_leave_no_rank(hosts: SshHosts) -> None:
    head = hosts.start("run", "--hosts", "a,b", script(hosts, "tell(f'told-{rank}'); time.sleep(600)"))
    hosts.await_told(0, 1)
    guardian, agent = hosts.find("b", "guardian.py"), hosts.find("b", "agent --stdio")
    os.kill(guardian, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    head.communicate(timeout=60)
    assert head.returncode == 74


def test_all_hosts_are_empty_within_a_second_of_the_first_failure(hosts: SshHosts) -> None:
    """Although the ranks ignore SIGTERM; the bar has room for a busy machine."""
    name = script(
        hosts,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(f"told-{rank}")
        if rank == 3:
            await_file("told-go")
            sys.exit(7)
        time.sleep(600)
        """,
    )
    head = hosts.start("run", "--hosts", "a:2,b:2", name)
    hosts.await_told(*range(4))
    (hosts.folder / "told-go").touch()
    begin = time.monotonic()
    head.communicate(timeout=60)
    assert (head.returncode, time.monotonic() - begin < 30.0) == (7, True)
    hosts.await_empty()


def test_a_host_that_is_cut_off_is_named_and_its_ranks_die_by_themselves(hosts: SshHosts) -> None:
    head = started(hosts)
    hosts.network.drop("b", HEAD)
    _, err = head.communicate(timeout=60)
    assert head.returncode == 74
    text = err.decode()
    assert "shoal: host b is lost, and with it ranks 2, 3: nothing has come from its agent for 5 s" in text
    assert "shoal: rank 2 on b failed first: its host was lost, after " in text
    hosts.await_agents_end("b")


def test_sigint_reaches_all_hosts_and_a_second_one_kills(hosts: SshHosts) -> None:
    name = script(
        hosts,
        """
        def save(number, frame):
            tell(f"told-saves-{rank}")
        signal.signal(signal.SIGINT, save)
        tell(f"told-{rank}")
        await_signal()
        """,
    )
    head = hosts.start("run", "--hosts", "a:2,b:2", name)
    hosts.await_told(*range(4))
    head.send_signal(signal.SIGINT)
    hosts.await_told(*(f"saves-{rank}" for rank in range(4)))
    time.sleep(0.3)  # two that come at once are one, from the terminal and from its shell
    head.send_signal(signal.SIGINT)
    _, err = head.communicate(timeout=60)
    assert head.returncode == 130
    assert err.endswith(b"shoal: stopped by SIGINT: ranks 0-3 were killed by SIGKILL\n")


def test_sigusr1_is_passed_on_and_the_job_goes_on(hosts: SshHosts) -> None:
    name = script(
        hosts,
        """
        signal.signal(signal.SIGUSR1, lambda *_: (print("saved"), sys.exit(0)))
        tell(f"told-{rank}")
        await_signal()
        """,
    )
    head = hosts.start("run", "--hosts", "a,b", name)
    hosts.await_told(0, 1)
    head.send_signal(signal.SIGUSR1)
    out, err = head.communicate(timeout=60)
    assert (head.returncode, sorted(out.splitlines()), err) == (0, [b"[0] saved", b"[1] saved"], b"")


def test_a_host_that_refuses_is_named_with_what_ssh_says(hosts: SshHosts) -> None:
    name = script(hosts, "tell('told-ran')")
    code, _, err = hosts.run("run", "--hosts", "a,nowhere.invalid", name)
    text = err.decode()
    assert code == 1
    assert "shoal: host nowhere.invalid: the connection has ended; ssh ended with exit code 255\n" in text
    assert "  | ssh: Could not resolve hostname nowhere.invalid" in text
    assert not (hosts.folder / "told-ran").exists()
