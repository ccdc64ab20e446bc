"""Jobs that go on when ranks fail: ``shoal run --min``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.quick_launcher import QuickLauncher

from .conftest import Workshop

#: ranks work together; those that the command line names are killed or exit, one after another; the others
#: rebuild the group
SCRIPT = """
import os, signal, sys
import torch
import shoal

group = shoal.init()
me = group.rank
for who in sys.argv[1].split(","):
    try:
        group.barrier().wait()
        if me == int(who):
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            group.all_reduce(torch.ones(1000)).wait()
    except shoal.PeerLost:
        group = group.rebuild()
x = torch.ones(1000)
group.all_reduce(x).wait()
print(f"{me} is {group.rank} of {group.size}: {x[0]:.0f}")
group.close()
sys.exit(3 if str(me) in sys.argv[2:] else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


#: Ends may be seen in another order than that in which they came: the kernel tells the launcher of one once
#: it has freed the memory, long after the others went on.
FAILED = r"failed: killed by SIGKILL, after [0-9.]+ s \(process [0-9]+\); ranks [-0-9, ]+ go on$"


def test_survivors_go_on_and_the_job_ends_well(launcher: QuickLauncher, script: str) -> None:
    code, out, err = launcher.run(4, script, "0,2", min_ranks=2)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[1] 1 is 1 of 2: 2", "[3] 3 is 0 of 2: 2"]
    assert sorted(re.findall(rf"^shoal: rank ([0-9]) {FAILED}", err, re.MULTILINE)) == ["0", "2"], err
    assert "shoal: 2 of 4 ranks finished; ranks " in err
    assert " were killed by SIGKILL\n" in err


def test_with_too_few_ranks_the_job_ends_as_others_do(launcher: QuickLauncher, script: str) -> None:
    code, _, err = launcher.run(4, script, "1,3", min_ranks=3)
    assert code == 137, err
    outlived = re.findall(rf"^shoal: rank ([0-9]) {FAILED}", err, re.MULTILINE)
    fatal = re.findall(r"^shoal: rank ([0-9]) failed first: killed by SIGKILL", err, re.MULTILINE)
    assert sorted(outlived + fatal) == ["1", "3"], err
    assert len(fatal) == 1, err


def test_a_rank_that_finished_counts_and_one_that_fails_later_does_not(
    launcher: QuickLauncher, script: str
) -> None:
    code, _, err = launcher.run(3, script, "1", "2", min_ranks=1)
    assert code == 0, err
    assert "rank 2 failed: exit code 3" in err
    code, _, err = launcher.run(3, script, "1", "2", min_ranks=2)
    assert code in (3, 137), err
    assert "shoal: rank 2 failed first: exit code 3" in err or "shoal: rank 1 failed first" in err


@pytest.mark.parametrize("min_ranks", ["3", "0", "two"])
def test_the_number_is_checked(workshop: Workshop, min_ranks: str) -> None:
    code, _, err = workshop.end(workshop.shoal("run", "-n", "2", "--min", min_ranks, "script.py"))
    assert code == 2
    assert b"--min" in err
