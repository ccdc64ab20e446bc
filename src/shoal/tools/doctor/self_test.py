"""The self test: two ranks, as processes of this host, run an all-reduce over shared memory and over TCP."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from typing import Any

from ...errors import ShoalError
from ...net import Deadline
from ...store import TCPStoreServer
from ..findings import Finding, fail, ok, warn
from . import software
from .children import TIMEOUT_S, ChildFailed, ProbeProcess
from .machine import usable_cores

#: timeout of the ranks' rendezvous and operations
_RANK_TIMEOUT_S = 20.0
_MEANS = {"shm": "shared memory", "tcp": "TCP over loopback"}
#: time of an all-reduce from which it is slow: many times that of an idle machine
_SLOW_US = {"shm": 100.0, "tcp": 1000.0}
_ADVICE = {
    "shm": "correct the failures above, or set SHOAL_TRANSPORT=tcp for every rank",
    "tcp": "correct the failures above, and let a firewall accept connections over loopback",
}
#: variables of launchers and of shoal, which would make the ranks part of another job
_OF_JOBS = ("SHOAL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_")


def two_ranks() -> list[Finding]:
    """Run the two ranks; a finding for each transport."""
    if not software.torch_works():
        return [ok("the self test was not run, because it needs torch")]
    try:
        results = _run([*_MEANS])
    except (ChildFailed, ShoalError, OSError) as error:
        return [fail(f"two ranks did not run: {error}", "correct the failures above")]
    return [_judge(transport, [each[transport] for each in results]) for transport in _MEANS]


def _run(transports: list[str]) -> list[dict[str, Any]]:
    secret = secrets.token_hex(16)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)}
    deadline = Deadline(TIMEOUT_S + _RANK_TIMEOUT_S)
    with ExitStack() as stack:
        server = stack.enter_context(TCPStoreServer(secret=secret.encode()).start())
        ranks = [
            stack.enter_context(ProbeProcess("rank", transports, environ={
                **inherited, "SHOAL_STORE": server.url, "SHOAL_SECRET": secret, "SHOAL_RANK": str(rank),
                "SHOAL_SIZE": "2", "SHOAL_TIMEOUT": str(_RANK_TIMEOUT_S), "OMP_NUM_THREADS": "1",
            }))
            for rank in range(2)
        ]  # fmt: skip
        return [rank.result(deadline.remaining()) for rank in ranks]


def _judge(transport: str, results: list[float | str]) -> Finding:
    errors = [f"rank {rank}: {each}" for rank, each in enumerate(results) if isinstance(each, str)]
    if len(errors) == len(results) and len(set(results)) == 1:
        errors = [f"on both: {results[0]}"]
    if errors:
        return fail(f"two ranks over {_MEANS[transport]}: {'; '.join(errors)}", _ADVICE[transport])
    slower = max(each for each in results if not isinstance(each, str))
    fact = f"two ranks over {_MEANS[transport]}: an all-reduce of 8 bytes takes {slower:.1f} us"
    if slower < _SLOW_US[transport]:
        return ok(fact)
    return warn(
        f"{fact}, on an idle machine less than {_SLOW_US[transport]:.0f} us; the load average of this one is "
        f"{os.getloadavg()[0]:.1f}, with {usable_cores():g} usable cores",
        "end other programs, or give the ranks cores of their own; then repeat this test",
    )
