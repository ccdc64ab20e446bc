"""The last commands of a node: in errors, and in the file that it writes when it is asked."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.node.history import MAX_DUMP_COMMANDS, RecentCommands
from shoal.launch.cli import invoke
from shoal.tools.call_dumps import CallDump
from shoal.tools.dumps import read
from tests.controller import nodes
from tests.controller.nodes import BACKSTOP, SECRET, Program, programs

start = pytest.fixture(programs)


def joins_in(tell: Connection, folder: str, url: str, secret: str) -> None:
    """``shoal worker URL`` with ``SHOAL_DUMP_DIR``."""
    os.environ["SHOAL_DUMP_DIR"] = folder
    nodes.joins(tell, url, secret)


def waits(path: str) -> None:
    """Tell that this runs, and wait until it may end."""
    Path(path).touch()
    deadline = time.monotonic() + BACKSTOP
    while Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_an_error_tells_what_the_node_did_before(master: Master) -> None:
    x = torch.arange(6.0, device="node:0")
    y = ((x + 1) * 2).exp()
    lost = y[torch.tensor([9], device="node:0")]
    with pytest.raises(shoal.RemoteOpError) as caught:
        lost.tolist()
    (line,) = [
        each for each in str(caught.value).splitlines() if each.startswith("before it, the node did: ")
    ]
    assert "aten.mul.Tensor, aten.exp, " in line
    assert line.endswith("put")  # the index
    assert "aten.index.Tensor" not in line


def test_an_error_of_a_function_tells_it_too(master: Master) -> None:
    torch.ones(3, device="node:1").sqrt()
    with pytest.raises(shoal.RemoteOpError, match=r"before it, the node did: .*aten\.sqrt\n"):
        master.call("node:1", int, "one")


def test_no_more_is_kept_than_is_told() -> None:
    recent = RecentCommands(test_no_more_is_kept_than_is_told.__code__)
    assert recent.commands() == ([], "")
    seed = torch.tensor([3, 1, 0], dtype=torch.int32).numpy().tobytes()
    calls = {3: (None, 3, 0)}
    for _ in range(1000):
        recent.begin(calls, {}, seed)
    assert recent.commands() == (["seed"] * MAX_DUMP_COMMANDS, "")
    assert len(recent._logs) == MAX_DUMP_COMMANDS
    for _ in range(3):
        recent.begin(calls, {}, seed * 50_000)
    assert len(recent._logs) == 1
    assert recent.commands() == (["seed"] * MAX_DUMP_COMMANDS, "")
    recent.clear()
    assert recent.commands() == ([], "")


@pytest.mark.usefixtures("no_master")
def test_a_node_that_is_asked_by_a_signal_writes_what_it_does(
    start: Callable[..., Program], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, dumps, flag = f"file://{tmp_path}/store", tmp_path / "dumps", tmp_path / "flag"
    start(joins_in, str(dumps), url, SECRET)
    with shoal.init_master_worker(url=url, secret=SECRET) as master:
        master.wait_for(1, BACKSTOP)
        x = torch.arange(6.0, device="node:0")
        for _ in range(300):
            x = (x * 1.5).tanh()
        master.synchronize()
        pid = master.pids[0]
        dump = _asked(pid, dumps)
        (told,) = dump.nodes
        assert (told.commands[-2:], told.runs, len(told.commands)) == (
            ["aten.mul.Tensor", "aten.tanh"],
            "",
            MAX_DUMP_COMMANDS,
        )
        calling = threading.Thread(target=master.call, args=("node:0", waits, str(flag)))
        calling.start()
        while not flag.exists():
            time.sleep(0.001)
        (told,) = _asked(pid, dumps).nodes
        assert told.runs == "call"
        assert invoke(["dumps", str(dumps)]) == 0
        assert "a node, runs call, after " in capsys.readouterr().out
        flag.unlink()
        calling.join()


def _asked(pid: int, folder: Path) -> CallDump:
    for each in folder.glob("*.json"):
        each.unlink()
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + BACKSTOP
    while not (found := list(folder.glob("*.json"))):
        assert time.monotonic() < deadline, "it writes nothing"
        time.sleep(0.001)
    dump = read(found[0])
    assert isinstance(dump, CallDump)
    return dump
