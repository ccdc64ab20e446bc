"""A job that is not elastic is started again as a whole: ``shoal run --max-restarts``."""

from __future__ import annotations

import re
import signal
import textwrap

import pytest

from tests.support.waiting import until

from .conftest import PRELUDE, Workshop, alive
from .test_hosts import far as far

#: rank 1 fails in the first starts
SCRIPT = """
epoch = int(os.environ["SHOAL_EPOCH"])
print("start", epoch, os.sched_getaffinity(0) == {min(os.sched_getaffinity(0))}, flush=True)
tell(f"began{epoch}.{rank}")
await_file(f"began{epoch}.{1 - rank}")
if rank == 1 and epoch < 2:
    sys.exit(3 + epoch)
if epoch == 2:
    import shoal.rendezvous
    with shoal.rendezvous.open_point() as place:
        place.store.set(f"came/{rank}", b"")
        place.store.wait(["came/0", "came/1"], 60)
else:
    await_signal()
"""


def command(workshop: Workshop, script: str, *options: str) -> tuple[str, ...]:
    (workshop.path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    return ("run", *options, "script.py")


@pytest.mark.parametrize("hosts", [False, True])
def test_all_ranks_are_started_again_after_a_failure(far: Workshop, hosts: bool) -> None:
    where = ("--hosts", "h1:2") if hosts else ("-n", "2")
    options = (*where, "--bind", "--max-restarts", "3", "--log-dir", "logs")
    code, out, err = far.end(far.shoal(*command(far, SCRIPT, *options)))
    assert code == 0, err
    each = [f"[{rank}] start {epoch} True" for rank in range(2) for epoch in range(3)]
    assert sorted(out.decode().splitlines()) == each
    failures = re.findall(r"rank 1(?: on h1)? failed first: exit code ([0-9])", err.decode())
    again = re.findall(r"^shoal: starting all ranks again: (.*)$", err.decode(), re.MULTILINE)
    assert (failures, again) == (["3", "4"], ["restart 1 of 3", "restart 2 of 3"])
    log = (far.path / "logs" / "rank0.log").read_text().splitlines()
    assert log[:2] == ["start 0 True", "--- starting all ranks again: restart 1 of 3 ---"]
    assert (len(log), log[-1]) == (5, "start 2 True")


def test_the_exit_code_is_that_of_the_last_start(workshop: Workshop) -> None:
    script = "sys.exit(3 + int(os.environ['SHOAL_EPOCH']))"
    code, _, err = workshop.end(workshop.shoal(*command(workshop, script, "--max-restarts", "1")))
    assert (code, err.count(b"failed first"), err.count(b"again")) == (4, 2, 1)


def test_a_job_that_is_stopped_is_not_started_again(workshop: Workshop) -> None:
    script = "tell('ready'); await_signal()"
    job = workshop.shoal(*command(workshop, script, "--max-restarts", "3"))
    workshop.read("ready")
    job.send_signal(signal.SIGTERM)
    code, _, err = workshop.end(job)
    assert (code, err) == (143, b"shoal: stopped by SIGTERM: rank 0 was killed by SIGTERM\n")


def test_a_stop_signal_while_a_failed_job_ends_prevents_the_restart(workshop: Workshop) -> None:
    """Rank 0 has caused the failure, so it gets time to end by itself, and does not."""
    script = """
    from shoal import failure_report
    if rank == 0:
        failure_report.failed(ValueError())
        tell("failed")
        await_signal()
    await_file("failed")
    tell("other", os.getpid())
    failure_report.notified([0])
    sys.exit(3)
    """
    job = workshop.shoal(*command(workshop, script, "-n", "2", "--max-restarts", "3"))
    pid = int(workshop.read("other"))
    until(lambda: not alive(pid))
    job.send_signal(signal.SIGTERM)
    code, _, err = workshop.end(job)
    assert code != 0
    assert b"again" not in err


def test_an_elastic_job_is_not_restarted_as_a_whole(workshop: Workshop) -> None:
    options = ("-n", "2", "--min", "1", "--max-restarts", "1")
    code, _, err = workshop.end(workshop.shoal(*command(workshop, "", *options)))
    assert code == 2
    assert err.startswith(
        b"shoal: --max-restarts restarts the whole job and cannot be combined with --min, which"
    )
