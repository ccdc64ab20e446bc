"""The defaults in docs/timeouts.md are those of the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shoal
from shoal import config, world
from shoal.controller import Master
from shoal.elastic.membership import candidates
from shoal.launch import agent_protocol as frames
from shoal.launch.job import evictions, launch, supervisor
from shoal.launch.remote import agent_pool
from shoal.net import HANDSHAKE_TIMEOUT_S
from shoal.rpc import Agent
from shoal.rpc.functional import shutdown
from shoal.testing import run_threads
from shoal.torch_terms.arguments import CLOSE_TIMEOUT_S, default_pg_timeout

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "timeouts.md"
UNITS = {"s": 1.0, "min": 60.0}


def default_of(function: Callable[..., Any]) -> float:
    return float(inspect.signature(function).parameters["timeout"].default)


def of_stopped_peers() -> float:
    """Seconds until a peer on the same host that is stopped is lost: a number of looks."""
    peers = (ROOT / "cpp" / "engine" / "peers.cc").read_text()
    context = (ROOT / "cpp" / "engine" / "context.cc").read_text()
    looks = re.search(r"kSilentChecks = (\d+), kStoppedChecks = (\d+);", peers)
    pause = re.search(
        r"idle_peer_check_interval\(int ranks\) \{\s*return std::max\(.*, (\d+) \* kMillisecond\)", context
    )
    assert looks
    assert pause
    return (int(looks[1]) + int(looks[2])) * int(pause[1]) / 1000


#: the beginning of a row of the page, and its default in seconds
DEFAULTS: list[tuple[str, float]] = [
    ("collective, send or receive", config.TIMEOUT.default),
    ("the same with `shoal.distributed`", default_pg_timeout.total_seconds()),
    ("the same with torch's", dist.default_pg_timeout.total_seconds()),
    ("a vote in an agreement", config.VOTE_TIMEOUT.default),
    ("`destroy_process_group()`", CLOSE_TIMEOUT_S),
    ("groups that are open when the program ends", world._EXIT_TIMEOUT_S),
    ("`shoal.init`", config.TIMEOUT.default),
    ("torch's `init_process_group", dist.default_pg_timeout.total_seconds()),
    ("the handshake of a connection", HANDSHAKE_TIMEOUT_S),
    ("a call of a store", config.TIMEOUT.default),
    ("`Session(state, min_size=n)`", config.TIMEOUT.default),
    ("processes that join a session", config.VOTE_TIMEOUT.default / 2),
    ("a session without a heartbeat", candidates.HEARTBEAT_TIMEOUT_S),
    ("a rank on the same host is stopped", of_stopped_peers()),
    ("no message from another host", config.HEARTBEAT_TIMEOUT.default),
    ("a node of a master is stopped", config.HEARTBEAT_TIMEOUT.default),
    ("a call of `shoal.rpc`", config.RPC_TIMEOUT.default),
    ("`agent.close()`", default_of(Agent.close)),
    ("`shoal.init_master_worker`", default_of(shoal.init_master_worker)),
    ("`master.wait_for`, `master.replace`", default_of(Master.wait_for)),
    ("`master.wait_for`, `master.replace`", default_of(Master.replace)),
    ("`shoal run`: the other ranks after one failed", supervisor.FAILURE_GRACE_S),
    ("`shoal run`: a rank that failed", supervisor.CULPRIT_GRACE_S),
    ("`shoal run`: an evicted process may", evictions.EXIT_TIMEOUT_S),
    ("`shoal run`: an evicted process after", evictions.KILL_DELAY_S),
    ("`shoal run`: ranks after Ctrl-C", launch.STOP_GRACE_S),
    ("`shoal run`: a rank ended with 0", supervisor.EARLY_EXIT_WARNING_S),
    ("`shoal run --hosts`: an agent starts", agent_pool.START_TIMEOUT_S),
    ("`shoal run --hosts`: no message", frames.SILENCE_TIMEOUT_S),
    ("`shoal.testing.run_threads`", default_of(run_threads)),
]


def rows() -> dict[str, str]:
    """The first cell of each row of the tables, and its default."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if row[0] != "timeout" and not row[0].startswith("-")}


@pytest.mark.parametrize(("timeout", "seconds"), DEFAULTS)
def test_a_default_on_the_page_is_that_of_the_code(timeout: str, seconds: float) -> None:
    (default,) = [default for name, default in rows().items() if name.startswith(timeout)]
    number, unit = re.match(r"([\d.]+) (s|min)\b", default).groups()  # type: ignore[union-attr]
    assert float(number) * UNITS[unit] == seconds


def test_each_number_on_the_page_is_compared() -> None:
    numbers = {name for name, default in rows().items() if default[0].isdigit()}
    assert not {name for name in numbers if not any(name.startswith(timeout) for timeout, _ in DEFAULTS)}


def test_where_the_page_has_no_limit_there_is_none() -> None:
    assert rows()["`rpc.shutdown()`"] == "none"
    assert default_of(shutdown) == 0.0  # which means no limit
    assert rows()["`future.wait()`, `wait_all`, `wait_any`"].startswith("none")
    for function in (shoal.Future.wait, shoal.wait_all, shoal.wait_any):
        assert inspect.signature(function).parameters["timeout"].default is None


def test_variables_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"SHOAL_\w+", PAGE.read_text()))
    assert named <= {variable.name for variable in config.VARIABLES}
    seconds = {variable.name for variable in config.VARIABLES if variable.expected == config.TIMEOUT.expected}
    assert seconds <= named
