"""Ranks that meet in a store of torch.distributed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal import Membership, RendezvousTimeout
from shoal.rendezvous import Venue
from shoal.rendezvous.membership import rendezvous_at
from shoal.rendezvous.point import RendezvousPoint
from shoal.store import adopt
from tests.support.torch_stores import TIMEOUT, PythonStore, connect, serve

from .together import all_well, release_all, request, together

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return serve()


@pytest.fixture(params=["tcp", "file", "hash", "python"])
def stores(
    request: pytest.FixtureRequest, server: dist.TCPStore, tmp_path: Path
) -> Iterator[list[dist.Store]]:
    """What torch would give the backends of three ranks."""
    if request.param == "tcp":
        below = [connect(server) for _ in range(3)]
    elif request.param == "file":
        below = [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    else:
        below = [dist.HashStore() if request.param == "hash" else PythonStore()] * 3
    yield [dist.PrefixStore("0", dist.PrefixStore(request.node.name, store)) for store in below]
    below.clear()  # torch does not hold a store that is written in Python


def _meet(store: dist.Store, rank: int, size: int, timeout: float = 20.0) -> Membership:
    venue = Venue(adopt(store), rank, size, job="torch", epoch=0, private=True)
    return rendezvous_at(RendezvousPoint.at(venue, request("torch://", timeout=timeout)))


def _meet_all(stores: list[dist.Store]) -> list[Membership]:
    return all_well(together(*[lambda r=r: _meet(stores[r], r, len(stores)) for r in range(len(stores))]))


def test_ranks_meet_agree_on_a_secret_and_leave_nothing_but_what_the_next_ones_need(
    stores: list[dist.Store],
) -> None:
    for meeting in range(1, 3):
        members = _meet_all(stores)
        assert [(member.rank, member.size) for member in members] == [(0, 3), (1, 3), (2, 3)]
        assert len({member.secret for member in members}) == 1
        assert len(members[0].secret) == 64
        members[1].store.set("own", b"value")
        assert members[2].store.get("own") == b"value"
        release_all(members)
        assert adopt(stores[0]).list_keys() == [f"torch/0/ended/{meeting - 1}", "torch/0/room"]


def test_a_rank_that_never_comes_is_named(stores: list[dist.Store]) -> None:
    results = together(*[lambda r=r: _meet(stores[r], r, 3, timeout=1.5) for r in (0, 2)])
    for result in results:
        assert isinstance(result, RendezvousTimeout)
        assert "1 did not come" in str(result)


_SERVER = """
import os, sys
import torch.distributed as dist
from tests.rendezvous.test_torch_stores import _meet
from tests.support.torch_stores import serve
store = serve()
print(store.port, flush=True)
_meet(dist.PrefixStore("p", store), 0, 2)
sys.stdin.read()
os._exit(0)
"""


def test_leaving_works_when_the_process_that_serves_the_store_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as rank_zero:
        assert rank_zero.stdin is not None
        assert rank_zero.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(rank_zero.stdout.readline()), None, False, TIMEOUT)
        member = _meet(dist.PrefixStore("p", store), 1, 2)
        rank_zero.stdin.close()
        assert rank_zero.wait(30) == 0
        member.release(10.0)
