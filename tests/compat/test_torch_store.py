"""Our stores where torch.distributed takes one of its own."""

from __future__ import annotations

import datetime
import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

import shoal
from shoal.compat import TorchStore
from shoal.compat.torch_store import _Queue
from shoal.store import Store, adopt
from tests.support.dictionary_store import Dictionary

ROOT = Path(__file__).resolve().parents[2]
SHORT = datetime.timedelta(milliseconds=20)


@pytest.fixture
def ours() -> Iterator[TorchStore]:
    store = TorchStore(shoal.MemoryStore(30))
    yield store
    store.close()


@pytest.fixture(params=["itself", "prefix"])
def store(request: pytest.FixtureRequest, ours: TorchStore) -> dist.Store:
    """The store as Python sees it, and as torch's C++ does."""
    return ours if request.param == "itself" else dist.PrefixStore("a", dist.PrefixStore("b", ours))


def test_everything_that_torch_can_call(store: dist.Store) -> None:
    store.set("key", "text")
    store.set("bytes", b"\xff\0")
    assert store.get("bytes") == b"\xff\0"
    assert store.multi_get(["key", "bytes"]) == [b"text", b"\xff\0"]
    store.multi_set(["one", "two"], ["1", b"\xfe"])
    assert store.check(["one", "two"])
    assert not store.check(["one", "three"])
    assert store.add("count", 3) == 3
    assert store.add("count", -5) == -2
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "wrong", "second") == b"first"
    assert store.compare_set("new", "first", b"\xfd") == b"\xfd"
    store.append("log", "x")
    store.append("log", "x")
    assert store.get("log") == b"xx"
    assert store.num_keys() == 7
    assert store.delete_key("log")
    assert not store.delete_key("log")
    store.wait(["one", "two"])
    store.wait(["one"], SHORT)
    assert store.has_extended_api()
    store.barrier("all", 1)


def test_a_clone_has_connections_of_its_own(ours: TorchStore) -> None:
    ours.set_timeout(SHORT)
    other = ours.clone()
    ours.set("key", "value")
    assert other.get("key") == b"value"
    assert other.timeout == SHORT
    other.close()
    assert ours.get("key") == b"value"


def test_what_torch_cannot_call_works_from_python(ours: TorchStore) -> None:
    ours.multi_set(["b", "a"], ["", ""])
    assert ours.list_keys() == ["a", "b"]
    assert ours.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError, match="queue 'q' is empty"):
        ours.queue_pop("q", block=False)
    for value in ("1", b"2", "1"):
        ours.queue_push("q", value)
    assert ours.queue_len("q") == 3
    assert [ours.queue_pop("q") for _ in range(3)] == [b"1", b"2", b"1"]
    with ThreadPoolExecutor(16) as pool:
        popping = [pool.submit(ours.queue_pop, "q") for _ in range(8)]
        for _ in range(8):
            pool.submit(ours.queue_push, "q", "same")
        assert [each.result(30) for each in popping] == [b"same"] * 8
    assert ours.queue_len("q") == 0


def test_timeouts_are_torchs_and_end_in_torchs_error(store: dist.Store) -> None:
    assert store.timeout == datetime.timedelta(seconds=30)
    with pytest.raises(dist.DistStoreError, match=r"0\.02 s.*absent'"):
        store.wait(["absent"], SHORT)
    store.set_timeout(SHORT)
    for call in (store.get, lambda key: store.wait([key]), lambda key: store.multi_get([key])):
        with pytest.raises(dist.DistStoreError, match=r"0\.02 s.*absent'"):
            call("absent")


def test_errors_of_the_store_are_torchs_too(store: dist.Store) -> None:
    store.set("key", "no number")
    with pytest.raises(dist.DistStoreError, match="no counter"):
        store.add("key", 1)
    with pytest.raises(shoal.UsageError, match=r"expected a shoal\.store\.Store"):
        TorchStore(dist.HashStore())  # type: ignore[arg-type]


def test_torch_may_be_the_only_one_who_holds_it() -> None:
    below = shoal.MemoryStore(30)
    view = dist.PrefixStore("p", TorchStore(below))
    gc.collect()
    view.set("key", "value")
    assert below.get("p/key") == b"value"
    view.underlying_store.close()
    with pytest.raises(shoal.StoreError, match="closed"):
        below.get("p/key")


def test_there_and_back_again(store: dist.Store) -> None:
    with adopt(store) as back:
        back.multi_set(["x/2", "x/1"], [b"", b""])
        assert back.list_keys("x/") == ["x/1", "x/2"]
        assert back.add("count", 2) == 2


_RANK = """
import datetime, sys
import torch, torch.distributed as dist
import shoal
from shoal.compat import TorchStore
torch.set_num_threads(1)
rank = int(sys.argv[1])
if rank == 0:
    server = shoal.TCPStoreServer("127.0.0.1", 0, b"s").start()
    print(server.port, flush=True)
store = TorchStore(shoal.TCPStore("127.0.0.1", server.port if rank == 0 else int(sys.argv[2]), b"s"))
timeout = datetime.timedelta(seconds=30)
for backend in ("gloo", "shoal"):
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    world = dist.group.WORLD
    for group in (world, dist.new_group([0, 1])):
        number = torch.tensor([rank + 1.0])
        dist.all_reduce(number, group=group)
        assert number.item() == 3.0
    dist.barrier()
    dist.destroy_process_group()
sys.stdout.write("done")
sys.stdout.flush()
sys.stdin.read()
store.close()
"""


def test_torchs_process_groups_meet_in_it() -> None:
    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", _RANK, *args]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    with start("0") as zero:
        assert zero.stdout is not None
        with start("1", zero.stdout.readline().strip()) as one:
            assert one.stdout is not None
            assert one.stdout.read(4) == zero.stdout.read(4) == "done"
            for rank in (one, zero):
                rank.communicate(timeout=30)
                assert rank.returncode == 0


class Restless(Dictionary):
    """Other clients change every queue between any two looks."""

    def get_now(self, key: str) -> bytes | None:
        return msgspec.msgpack.encode(_Queue([b"another's"]))


def test_a_queue_that_others_change_all_the_time_is_given_up_at_the_deadline() -> None:
    store = TorchStore(Store(Restless("name"), 0.02))
    for call in (lambda: store.queue_push("q", b"mine"), lambda: store.queue_pop("q")):
        with pytest.raises(dist.DistStoreError, match=r"queue 'q' was changed by others all"):
            call()
    store.close()
