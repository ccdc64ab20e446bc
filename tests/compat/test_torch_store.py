"""Our stores where torch.distributed takes one of its own."""

from __future__ import annotations

import datetime
import gc
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
from tests.support import releases
from tests.support.dictionary_store import Dictionary
from tests.support.programs import run_program

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
    if releases.STORE_BARRIER:
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
import datetime, os, sys, warnings
import torch, torch.distributed as dist
import shoal
from shoal.compat import TorchStore
warnings.simplefilter("error")
rank, port = int(os.environ["SHOAL_RANK"]), int(sys.argv[1])
store = TorchStore(shoal.TCPStore("127.0.0.1", port, b"s"))
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
store.close()
print("done")
"""


def test_torchs_process_groups_meet_in_it(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    with shoal.TCPStoreServer("127.0.0.1", 0, b"s") as server:
        written = run_program(script, 2, str(server.port), folder=tmp_path)
    assert all("done" in each for each in written)


class Restless(Dictionary):
    """Other clients change every queue between any two looks."""

    def get_now(self, key: str) -> bytes | None:
        return msgspec.msgpack.encode(_Queue([b"another's"]))


def test_a_queue_that_others_change_all_the_time_is_given_up_at_the_deadline() -> None:
    store = TorchStore(Store(Restless("name"), 0.02))
    for call in (lambda: store.queue_push("q", b"mine"), lambda: store.queue_pop("q")):
        with pytest.raises(dist.DistStoreError, match=r"queue 'q' was continuously changed by other clients"):
            call()
    store.close()
