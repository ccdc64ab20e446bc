"""The ways in which a master gets its nodes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import shoal
from shoal import rpc
from shoal.controller import Master
from shoal.controller.node import sessions
from shoal.controller.node.serving import serve_masters
from shoal.controller.protocol.workers import JoinQueue
from shoal.errors import AuthenticationError, RendezvousTimeout, UsageError
from shoal.launch.cli import invoke
from shoal.rendezvous.launcher_variables import read
from shoal.store import TCPStoreServer
from tests.controller import nodes
from tests.controller.nodes import BACKSTOP, SECRET, Program, programs
from tests.support.ports import free_port
from tests.support.quick_launcher import QuickLauncher
from tests.support.waiting import until

start = pytest.fixture(programs)
Start = Callable[..., Program]


def test_nobody_joins_a_master_without_a_url(master: Master) -> None:
    with pytest.raises(UsageError, match="no worker can join this master: pass init_master_worker the url="):
        master.wait_for(4)


def test_rank_0_of_shoal_run_is_the_master_and_the_others_end_with_it(
    launcher: QuickLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, shoal\n"
        "with shoal.init_master_worker() as master:\n"
        "    print([torch.full((2,), 3.0, device=each).sum().item() for each in master.nodes])\n"
        "print('only the master comes here')\n"
    )
    code, out, err = launcher.run(4, str(script))
    assert (code, err) == (0, "")
    assert out.splitlines() == ["[0] [6.0, 6.0, 6.0]", "[0] only the master comes here"]


def _torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"test-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def _slurm(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_LOCALID": str(rank),
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": str(port),
    }  # fmt: skip


def _mpich(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size), "PMI_JOBID": str(port),
    }  # fmt: skip


@pytest.mark.parametrize("launched", [_torchrun, _slurm, _mpich])
def test_other_launchers_give_the_same(start: Start, launched: Callable[..., dict[str, str]]) -> None:
    with TCPStoreServer() as server:  # a port that nobody else has
        told = [launched(rank, 3, server.port) for rank in range(3)]
        assert all(read(each) is not None for each in told)
        ranks = [start(nodes.is_rank, each) for each in told]
        assert ranks[0].told() == [6.0, 6.0]
        assert [rank.ended() for rank in ranks] == [0, 0, 0]


@pytest.mark.usefixtures("no_master")
def test_workers_join_by_hand_in_the_order_of_their_coming_also_later(start: Start, url: str) -> None:
    first = start(nodes.joins, url, SECRET)
    assert first.told() == f"waits for a master at {url}"
    with shoal.init_master_worker(url=url, secret=SECRET) as master:
        with pytest.raises(UsageError, match="no worker has joined yet"):
            master.nodes  # noqa: B018
        assert list(master.wait_for(1, BACKSTOP)) == [torch.device("node:0")]
        x = torch.ones(3, device="node:0")
        torch.manual_seed(7)
        second = start(nodes.joins, url, SECRET)
        assert list(master.wait_for(2, BACKSTOP)) == [torch.device("node", each) for each in range(2)]
        assert master.pids == [first.pid, second.pid]
        assert torch.node.device_count() == 2  # type: ignore[attr-defined]
        assert (x.to("node:1") + 1).tolist() == [2, 2, 2]
        drawn = [torch.rand(3, device=each).tolist() for each in master.nodes]
        assert drawn == [torch.manual_seed(7) and torch.rand(3).tolist()] * 2
        with pytest.raises(
            RendezvousTimeout, match=r"node 2 within 0.01 s: start one by `shoal worker tcp://"
        ):
            master.wait_for(3, 0.01)


@pytest.mark.usefixtures("no_master")
def test_a_ctrl_c_ends_the_wait_for_workers_and_nothing_else(start: Start, url: str) -> None:
    program = threading.get_ident()

    def press() -> None:
        until(lambda: _runs(program, JoinQueue.take.__code__))
        os.kill(os.getpid(), signal.SIGINT)

    with shoal.init_master_worker(url=url, secret=SECRET) as master:
        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            master.wait_for(1, BACKSTOP)
        pressing.join()
        start(nodes.joins, url, SECRET)
        (device,) = master.wait_for(1, BACKSTOP)
        assert torch.ones(2, device=device).tolist() == [1, 1]


def _runs(thread: int, code: CodeType) -> bool:
    """Whether a thread is in a function."""
    frame: FrameType | None = sys._current_frames()[thread]
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@pytest.mark.usefixtures("no_master")
def test_workers_serve_one_master_after_another_and_keep_nothing(start: Start, url: str) -> None:
    workers = [start(nodes.joins, url, SECRET) for _ in range(2)]
    killed = start(nodes.is_master, url, SECRET, 2)
    assert killed.told() == [2.0, 2.0]
    kind, text = _refused(start, url)
    assert kind == "UsageError"
    assert (
        f"this rendezvous point has another master: name='master' is not unique: process {killed.pid}" in text
    )
    killed.kill()
    for worker in workers:
        assert [worker.told(), worker.told()] == [f"waits for a master at {url}", "waits for another master"]
    with shoal.init_master_worker(url=url, secret=SECRET) as master:
        master.wait_for(2, BACKSTOP)
        assert torch.ones(2, device="node:1").sum().item() == 2
        assert _sessions(master) == [1, 1]
        assert sorted(master.pids) == sorted(worker.pid for worker in workers)
    assert [worker.told() for worker in workers] == ["waits for another master"] * 2


def _refused(start: Start, url: str) -> tuple[str, str]:
    told: tuple[str, str] = start(nodes.is_second_master, url, SECRET).told()
    return told


def _sessions(master: Master) -> list[int]:
    agent: rpc.Agent = master._workers.agent
    return [peer.call(_count_sessions).wait() for peer in agent.peers()]


def _count_sessions() -> int:
    return len(sessions._sessions)


@pytest.mark.usefixtures("no_master")
def test_the_master_serves_the_store_where_nobody_listens(start: Start) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    start(nodes.joins, url, SECRET)
    for _ in range(2):
        with shoal.init_master_worker(url=url, secret=SECRET) as master:
            master.wait_for(1, BACKSTOP)
            assert torch.ones(2, device="node:0").sum().item() == 2


@pytest.mark.usefixtures("no_master")
def test_workers_that_are_started_and_that_join_are_nodes_of_one_master(start: Start, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with shoal.init_master_worker(workers=1, url=url) as master:
        joined = start(nodes.joins, url)
        master.wait_for(2, BACKSTOP)
        assert master.pids[1] == joined.pid
        assert [torch.ones(2, device=each).sum().item() for each in master.nodes] == [2, 2]


@pytest.mark.usefixtures("no_master")
def test_what_cannot_start_says_why(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"1 rank, and a master needs at least 2; pass workers=n to start"):
        shoal.init_master_worker()
    with pytest.raises(AuthenticationError):
        shoal.init_master_worker(url=url, secret="another one")
    monkeypatch.setenv("SHOAL_SECRET", "another one")
    with pytest.raises(AuthenticationError):
        serve_masters(url, "worker", lambda text: None)
    monkeypatch.setenv("SHOAL_TIMEOUT", "0.2")
    with pytest.raises(RendezvousTimeout, match="the process that starts the store, is late or has ended"):
        serve_masters(f"tcp://127.0.0.1:{free_port()}", "worker", lambda text: None)


def test_the_command_tells_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["worker", "--help"]) == 0
    assert "--threads NUMBER" in capsys.readouterr().out
    assert invoke(["worker"]) == 2
    assert "Missing argument 'URL'" in capsys.readouterr().err
