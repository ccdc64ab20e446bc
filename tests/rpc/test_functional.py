"""The functions of torch.distributed.rpc over shoal, on workers that are processes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as theirs

import shoal
import shoal.rpc as rpc
from shoal.errors import (
    CallTimeout,
    RendezvousError,
    RendezvousTimeout,
    UnknownWorker,
    UsageError,
    WorkerLost,
)
from shoal.testing import no_leaks
from tests.compat.pool import Pool, Pools
from tests.compat.rank import Context
from tests.rpc import handlers
from tests.support.ports import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rpc.md"


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(backend=None)) as pools:
        yield pools


@pytest.fixture
def pool(pools: Pools) -> Pool:
    """Three processes that call ``init_rpc`` themselves."""
    return pools(3)


def begin(
    context: Context, *, fixed: bool = True, timeout: float | None = None, place: str = "place", url: str = ""
) -> str:
    """Join the others as ``w0``, ``w1``, ...; the name of the next one."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=url or f"file://{context.scratch}/{place}", rpc_timeout=timeout
    )
    rpc.init_rpc(
        f"w{context.rank}",
        rank=context.rank,
        world_size=context.size if fixed else None,
        rpc_backend_options=options,
    )
    return f"w{(context.rank + 1) % context.size}"


# -- calls -----------------------------------------------------------------------------------------


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    @rpc.functions.async_execution
    def later(self, to: str, x: torch.Tensor) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, self.value)).then(lambda future: future.value() + 1)


def add_to(ref: Any, n: int) -> int:
    return ref.local_value().add(n)


def mine(start: int) -> Any:
    return rpc.RRef(Counter(start))


def my_name() -> str:
    return rpc.get_worker_info().name


def a_program(context: Context) -> None:
    other = begin(context)
    next_rank = (context.rank + 1) % context.size
    info = rpc.get_worker_info(other)
    assert (info.name, info.id) == (other, next_rank)
    assert rpc.get_worker_info().id == context.rank
    for to in (other, next_rank, info, rpc.WorkerInfo(other, next_rank)):
        assert rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        assert rpc.rpc_async(to, int, ("11",), {"base": 2}).wait() == 3
        assert rpc.remote(to, list, args=[(1, 2)]).to_here() == [1, 2]
    assert isinstance(rpc.rpc_async(other, int), shoal.Future)
    assert rpc.rpc_sync(other, my_name) == other, "a handler's default agent is the one that was called"

    ref = rpc.remote(other, Counter, (5,))
    assert (ref.owner(), ref.owner().id, ref.owner_name()) == (info, next_rank, other)
    assert rpc.rpc_sync(ref.owner(), add_to, (ref, 2)) == 7
    assert ref.rpc_sync(timeout=0).add(1) == 8
    assert ref.rpc_async(timeout=20).later(other, torch.ones(1)).wait().tolist() == [10]
    assert ref.remote().add(1).to_here(timeout=0) == 9
    theirs_of_it = rpc.rpc_sync(other, mine, (1,))
    assert theirs_of_it.owner() == info
    assert theirs_of_it.rpc_sync().add(1) == 2
    own = rpc.RRef(Counter(0))
    assert rpc.rpc_sync(other, handlers.echo, (own,)).local_value() is own.local_value()

    with pytest.raises(ValueError, match="no such thing"):
        rpc.rpc_sync(other, handlers.fail, ("value",))
    rpc.shutdown()


LIBRARY = """
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions, rpc_sync

options = TensorPipeRpcBackendOptions(init_method="file://PLACE")
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert rpc_sync("alone", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
ref = rpc.remote("alone", dict, kwargs={"x": 1})
assert isinstance(ref, RRef) and ref.to_here() == {"x": 1}
rpc.shutdown()
print("done by", type(ref).__module__)
"""


def test_code_that_cannot_be_edited_gets_shoal_under_the_name_of_torch(tmp_path: Path) -> None:
    lines = PAGE.read_text().partition("**Code that cannot be edited**")[2].partition("```python\n")[2]
    program = lines.partition("```")[0] + LIBRARY.replace("PLACE", str(tmp_path / "place"))
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=handlers.PATIENCE * 2
    )
    assert ran.stdout == "done by shoal.rpc.calls.reference\n", ran.stderr


def test_a_program_needs_another_import_and_no_more(pool: Pool) -> None:
    pool.run(a_program)


def timeouts(context: Context) -> None:
    other = begin(context, timeout=0.25)
    assert rpc.get_rpc_timeout() == 0.25
    rpc.rpc_sync(other, int, timeout=60)  # connecting takes none of the time below
    with pytest.raises(CallTimeout, match=r"within 0\.25 s"):
        rpc.rpc_sync(other, handlers.until_cancelled, ("sync",))
    with pytest.raises(CallTimeout, match=r"within 0\.1 s"):
        rpc.rpc_async(other, handlers.until_cancelled, ("async",), timeout=0.1).wait()
    assert rpc.rpc_sync(other, time.sleep, (0.5,), timeout=0) is None
    assert rpc.remote(other, time.sleep, (0.5,), timeout=0).to_here(timeout=0) is None
    rpc.shutdown()


def test_a_timeout_of_zero_is_none(pool: Pool) -> None:
    pool.run(timeouts)


def unlimited(context: Context) -> None:
    other = begin(context, timeout=0)
    assert rpc.get_rpc_timeout() == 0
    assert rpc.rpc_sync(other, int, ("7",)) == 7
    rpc.shutdown()


def test_calls_without_a_limit_are_those_of_a_timeout_of_zero(pool: Pool) -> None:
    pool.run(unlimited)


def unknown(context: Context) -> None:
    begin(context)
    begun = time.monotonic()
    for to in ("nobody", context.size, -1):
        with pytest.raises(UnknownWorker, match="'w0', 'w1', 'w2'"):
            rpc.rpc_sync(to, int)
    for to in (0.5, None, True):
        with pytest.raises(UsageError, match="neither the name nor the rank"):
            rpc.rpc_async(to, int)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="TorchScript"):
        rpc.rpc_sync("w0", torch.jit.script(torch.nn.Identity()))
    with pytest.raises(UsageError, match="an autograd graph"):
        rpc.rpc_sync("w0", torch.add, (torch.ones(1, requires_grad=True) * 2, 1))
    for wrong, words in (
        ({"args": 5}, "args=5: expected a tuple"),
        ({"kwargs": 5}, "kwargs=5: expected a dict"),
        ({"kwargs": {1: 2}}, "kwargs={1: 2}: expected a dict"),
    ):
        for use in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(UsageError, match=words):
                use("w0", int, **wrong)  # type: ignore[operator]
    assert time.monotonic() - begun < 30, "nobody waited for a worker that is not there"
    rpc.shutdown()


def test_what_cannot_be_called_is_refused_at_once(pool: Pool) -> None:
    pool.run(unknown)


# -- meeting ---------------------------------------------------------------------------------------


def come_again(context: Context) -> None:
    for turn in range(3):
        name = begin(context, place="again" if turn < 2 else "elsewhere")
        assert rpc.rpc_sync(name, my_name) == name
        rpc.shutdown()


def test_the_same_workers_can_meet_again_at_the_same_place(pool: Pool) -> None:
    pool.run(come_again)


def come_again_at(context: Context, url: str) -> None:
    for _ in range(20):
        name = begin(context, url=url)
        assert rpc.rpc_sync(name, my_name) == name
        rpc.shutdown()


@pytest.mark.concurrency
def test_the_same_workers_can_meet_again_at_an_address_where_rank_0_serves_the_store(pool: Pool) -> None:
    with no_leaks():
        pool.run(come_again_at, f"tcp://127.0.0.1:{free_port()}")


def same_name(context: Context) -> None:
    with pytest.raises(UsageError, match=r"name='w0' is not unique: ranks 0, 2 have it"):
        rpc.init_rpc(
            f"w{context.rank % 2}",
            rank=context.rank,
            world_size=context.size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{context.scratch}/place"
            ),
        )


def test_all_hear_that_two_have_one_name(pool: Pool) -> None:
    pool.run(same_name)


def name_taken(context: Context) -> str:
    place = f"file://{context.scratch}/place"
    options = rpc.TensorPipeRpcBackendOptions(init_method=place)
    holder = rpc.join("w0", url=place) if context.rank == 0 else None
    try:
        rpc.init_rpc(
            f"w{context.rank}", rank=context.rank, world_size=context.size, rpc_backend_options=options
        )
    except (UsageError, RendezvousError) as error:
        return str(error)
    finally:
        if holder is not None:
            holder.close()
    return ""


def test_all_hear_that_one_could_not_join(pool: Pool) -> None:
    first, *others = pool.run(name_taken)
    assert "name='w0' is not unique" in first
    assert all("'w0' (rank 0) could not join" in words for words in others)


def one_by_one(context: Context) -> None:
    if context.rank == 0:
        begin(context, fixed=False)
        context.store.set(f"{context.scratch}/there", "")
    else:
        context.store.wait([f"{context.scratch}/there"])
        begin(context, fixed=False)
        assert rpc.rpc_sync("w0", int, ("7",)) == 7
        assert rpc.rpc_sync(0, my_name) == "w0"
    rpc.shutdown(timeout=1) if context.rank else None
    if context.rank == 0:
        context.store.wait([f"{context.scratch}/{rank} left" for rank in range(1, context.size)])
        rpc.shutdown()
    else:
        context.store.set(f"{context.scratch}/{context.rank} left", "")


def test_without_a_size_workers_come_and_go(pool: Pool) -> None:
    pool.run(one_by_one)


def test_those_that_did_not_come_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TIMEOUT", "0.2")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/place")
    with no_leaks(), pytest.raises(RendezvousTimeout, match=r"ranks 1, 2 of 3 have not joined within 0\.2 s"):
        rpc.init_rpc("w0", rank=0, world_size=3, rpc_backend_options=options)


def test_rank_and_size_and_place_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with no_leaks(), shoal.TCPStoreServer(secret=b"of this test").start() as server:
        monkeypatch.setenv("MASTER_PORT", str(server.port))
        monkeypatch.setenv("SHOAL_SECRET", "of this test")
        rpc.init_rpc("alone", world_size=1)
        assert rpc.rpc_sync(0, my_name) == "alone"
        assert rpc.get_worker_info().id == 0
        rpc.shutdown()


# -- the end ---------------------------------------------------------------------------------------


def chain(steps: int, names: list[str]) -> None:
    """Call the next worker, and do not wait."""
    if steps:
        time.sleep(0.005)
        rpc.rpc_async(names[0], chain, (steps - 1, [*names[1:], names[0]]))
    else:
        handlers.note("the chain has ended")


def leave_a_chain(context: Context) -> bool:
    handlers.noted.clear()
    begin(context)
    if context.rank == 0:
        chain(31, ["w1", "w2", "w0"])
    rpc.shutdown()
    return bool(handlers.noted)


def test_shutdown_waits_for_calls_that_calls_make(pool: Pool) -> None:
    for _ in range(3):
        assert pool.run(leave_a_chain) == [False, True, False], "the 31st step is at w1"


def late(context: Context) -> None:
    begin(context)
    if context.rank == 0:
        time.sleep(0.6)  # the others are waiting by then, and still serve
        assert [rpc.rpc_sync(to, my_name) for to in ("w1", "w2")] == ["w1", "w2"]
    rpc.shutdown()


def test_those_that_wait_in_shutdown_still_serve(pool: Pool) -> None:
    pool.run(late)


def not_coming(context: Context) -> None:
    begin(context)
    if context.rank == 0:
        with pytest.raises(UnknownWorker, match="'w1', 'w2' did not call shutdown"):
            rpc.shutdown(timeout=0.5)
        with pytest.raises(UsageError, match="RPC has not been initialized"):
            rpc.rpc_sync("w1", int)
        context.store.set(f"{context.scratch}/gone", "")
    else:
        context.store.wait([f"{context.scratch}/gone"])
        rpc.shutdown()  # w0 has left: nobody waits for it


def test_shutdown_ends_with_its_timeout_and_the_others_do_not_wait_for_who_left(pool: Pool) -> None:
    with no_leaks():
        pool.run(not_coming)


def die_or_hear_of_it(context: Context) -> None:
    import os
    import signal

    begin(context)
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # others may not have seen yet that it has joined
    with pytest.raises(WorkerLost, match="w2"):
        rpc.shutdown()
    if context.rank == 0:
        context.store.set(f"{context.scratch}/done", "")
    else:
        context.store.wait([f"{context.scratch}/done"])


def test_shutdown_fails_when_a_worker_has_died() -> None:
    with Pool(3, backend=None) as pool:
        pool.start(die_or_hear_of_it)
        first, second, killed = pool.collect(60, patience=60)  # the others get the whole time
        assert (first.ok, second.ok, killed.exitcode) == (True, True, -9)


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    with no_leaks():
        for name in ("rpc_sync", "rpc_async", "remote"):
            with pytest.raises(UsageError, match=f"{name}: RPC has not been initialized"):
                getattr(rpc, name)("w0", int)
        for call in (rpc.get_worker_info, rpc.get_rpc_timeout, rpc.shutdown):
            with pytest.raises(UsageError, match="RPC has not been initialized"):
                call()
        with pytest.raises(UsageError, match="RPC has not been initialized"):
            rpc.RRef(1)
        with pytest.raises(UsageError, match="expected a member of BackendType"):
            rpc.init_rpc("w0", backend="TENSORPIPE")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"expected shoal\.rpc\.TensorPipe"):
            rpc.init_rpc("w0", rpc_backend_options={})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="num_worker_threads=0: expected a whole number from 1"):
            rpc.init_rpc("w0", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=0))
        with pytest.raises(UsageError, match="rpc_timeout='x': expected a positive number of seconds"):
            rpc.init_rpc("w0", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout="x"))  # type: ignore[arg-type]
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/place")
        with pytest.raises(UsageError, match="rank= is missing"):
            rpc.init_rpc("w0", world_size=2, rpc_backend_options=options)
        rpc.init_rpc("w0", rpc_backend_options=options)
        try:
            with pytest.raises(UsageError, match="already initialized here, as 'w0'"):
                rpc.init_rpc("w1", rpc_backend_options=options)
        finally:
            rpc.shutdown()


def test_device_maps_are_collected_and_checked() -> None:
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"w1": {"cuda:0": "cuda:1"}}, devices=["cuda:0"])
    options.set_device_map("w1", {"cuda:1": "cuda:0", "cuda:0": "cuda:1"})
    options.set_device_map("w2", {"cpu": "cuda:0"})
    assert {to: {str(a): str(b) for a, b in pairs.items()} for to, pairs in options.device_maps.items()} == {
        "w1": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"},
        "w2": {"cpu": "cuda:0"},
    }
    assert options.devices == [torch.device("cuda:0")]
    for wrong, words in (
        ({"cuda:0": "cuda:2"}, "cuda:0 is already mapped to cuda:1"),
        ({"cuda:2": "cuda:1"}, "maps cuda:0 and cuda:2 to cuda:1: only a 1-to-1 mapping"),
        ({"no device": "cuda:1"}, "'no device' is not a device"),
    ):
        with pytest.raises(UsageError, match=words):
            options.set_device_map("w1", wrong)
    with pytest.raises(UsageError, match="set_devices: 'no device' is not a device"):
        options.set_devices(["no device"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are such devices here")
def test_the_devices_of_a_map_have_to_be_here(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{tmp_path / 'store'}", device_maps={"w1": {"cuda:0": "cuda:0"}}
    )
    with pytest.raises(UsageError, match="this worker has no cuda:0"):
        rpc.init_rpc("w0", rpc_backend_options=options)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["init_rpc", "shutdown", "rpc_sync", "rpc_async", "remote", "get_worker_info"]
)
def test_the_arguments_are_torchs(name: str) -> None:
    assert list(inspect.signature(getattr(rpc, name)).parameters) == list(
        inspect.signature(getattr(theirs, name)).parameters
    )


def test_the_options_and_references_take_what_torchs_take() -> None:
    ours = inspect.signature(rpc.TensorPipeRpcBackendOptions.__init__).parameters
    assert list(ours) == list(inspect.signature(theirs.TensorPipeRpcBackendOptions.__init__).parameters)
    methods = {name for name in dir(theirs.RRef) if not name.startswith("_")}
    assert methods - set(dir(rpc.RRef)) == {"backward"}


def test_the_page_tells_of_every_name_of_torchs() -> None:
    public = {name for name in dir(theirs) if not name.startswith("_")}
    noise = {"annotations", "dist", "logging", "numbers", "os", "threading", "timedelta", "torch", "urlparse",
             "warnings", "logger", "method", "method_name", "docstring", "Generator", "Store"}  # fmt: skip
    told = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("## From torch.distributed.rpc")[2]))
    assert not public - noise - told
    for name in public - noise:
        if not hasattr(rpc, name):
            with pytest.raises(AttributeError, match=f"'{name}': "):
                getattr(rpc, name)
