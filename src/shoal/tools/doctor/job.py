"""``shoal doctor --job``: which rank the others wait for now."""

from __future__ import annotations

import time

from ...common.formatting import counted
from ...rank_sampler import HELD_UP, RankRow, Sampler
from ..findings import Finding, fail, ok
from ..rank_table import by_job, culprits

#: seconds of waiting from which a rank is named
NAMED_FROM_S = 1.0
#: seconds between the two samples
_INTERVAL_S = 0.5


def check_job(name: str) -> list[Finding]:
    """Look at the ranks of the jobs whose name begins with ``name``, and find those that hold up others."""
    sampler = Sampler(name)
    sampler.rows()
    time.sleep(_INTERVAL_S)
    rows = sampler.rows()
    if not rows:
        return [
            fail(
                "no rank of such a job runs on this machine that you may see",
                "run it on a host of the job, as the user of the job or as root; shoal top shows all jobs",
            )
        ]
    return [each.placed(f"job {job!r}", "job") for job, of_job in by_job(rows) for each in _findings(of_job)]


def _findings(rows: list[RankRow]) -> list[Finding]:
    causes = culprits(rows, NAMED_FROM_S)
    found = [fail(str(each), each.advice) for each in causes]
    named = {each.rank for each in causes}
    for row in rows:
        if row.state in HELD_UP and row.rank not in named:
            found.append(
                fail(f"rank {row.rank} (process {row.pid}) is {row.state}", "continue it, or end the job")
            )
    if found:
        return found
    here = sum(not row.remote for row in rows)
    seen = f"{counted(len(rows), 'rank')} of {max(row.size for row in rows)}, {here} of them on this host"
    return [ok(f"{seen}: none waits for another one for more than {NAMED_FROM_S:.0f} s")]
