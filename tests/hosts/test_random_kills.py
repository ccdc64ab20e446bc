"""Parts of a launcher are killed at random moments, again and again: nothing is ever left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from tests.support.ssh_hosts import HEAD, SshHosts

from .conftest import script

#: seconds in which a job starts and runs on an idle machine: the moment of a kill is one of them
SPAN = 2.5


#: `make test` has played as many as CI is to; the short form of the long tests plays none again
MANY = [] if os.environ.get("STRESS") == "short" else [pytest.param(200, marks=pytest.mark.stress)]


@pytest.mark.parametrize("times", [10, *MANY])
def test_nothing_is_left_whichever_processes_are_killed(hosts: SshHosts, times: int) -> None:
    name = script(hosts, "time.sleep(600)")
    for number in range(times):
        dice = random.Random(number)
        head = hosts.start("run", "--hosts", "a:2,b:2", name)
        time.sleep(dice.uniform(0.0, SPAN))
        there = {pid: line for host in (HEAD, "a", "b") for pid, line in hosts.processes(host).items()}
        victims = dice.sample(sorted(there), min(len(there), dice.choice([1, 1, 1, 2, 3])))
        what = []
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                what.append(there[pid][-60:])
        if all("guardian.py" in line for line in what):  # or none was left
            head.send_signal(signal.SIGTERM)  # a job goes on without its guardians
        try:
            _, err = head.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            left = {host: hosts.processes(host) for host in (HEAD, "a", "b")}
            pytest.fail(f"seed {number}: the launcher lives after the end of {what}, beside {left}")
        assert head.returncode != 0, (number, what, err.decode())
        assert b"Traceback" not in err, (number, what, err.decode())
        hosts.await_empty()
