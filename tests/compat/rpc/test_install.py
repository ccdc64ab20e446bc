"""What torch's own tests of RPC do not look at: installing, and what is refused."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
import shoal.compat
from shoal.errors import UnsupportedOperation, UsageError, WorkerLost
from tests.compat.pool import Pool
from tests.compat.rank import Context


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2, backend=None)
    yield pool
    pool.close()


def begin(context: Context, place: str = "place") -> Any:
    shoal.compat.rpc.install()
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{context.scratch}/{place}")
    rpc.init_rpc(f"w{context.rank}", rank=context.rank, world_size=context.size, rpc_backend_options=options)
    return rpc


def end() -> None:
    torch.distributed.rpc.shutdown()
    shoal.compat.rpc.uninstall()


def names() -> dict[tuple[str, str], Any]:
    import torch.distributed.autograd
    import torch.distributed.rpc as rpc
    import torch.futures

    modules = (rpc, rpc.api, rpc.internal, rpc.backend_registry, torch.futures, torch.distributed.autograd)
    named = {(each.__name__, name): value for each in modules for name, value in vars(each).items()}
    return {key: value for key, value in named.items() if callable(value)}


def back_and_forth(context: Context) -> None:
    before = names()
    for place in ("first", "second"):  # torch removes the file of a store that is gone
        rpc = begin(context, place)
        shoal.compat.rpc.install()
        now = names()
        changed = {key for key in before if now[key] is not before[key]}
        assert ("torch.distributed.rpc", "RRef") in changed
        assert ("torch.distributed.rpc.api", "_invoke_rpc_python_udf") in changed
        assert rpc.rpc_sync(1 - context.rank, torch.add, args=(torch.ones(1), 1)).item() == 2
        with pytest.raises(UsageError, match="call its shutdown first"):
            shoal.compat.rpc.uninstall()
        end()
        after = names()
        assert not [key for key in before if after[key] is not before[key]]


def test_everything_is_put_back(pool: Pool) -> None:
    pool.run(back_and_forth)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def has_graph(x: torch.Tensor) -> tuple[bool, bool]:
    return x.grad_fn is not None, x.requires_grad


def refusals(context: Context) -> None:
    rpc = begin(context)
    to = f"w{1 - context.rank}"
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(UnsupportedOperation, match="was compiled by TorchScript"):
            call(to, torch.jit.script(plain), args=(torch.ones(1),))
    with pytest.raises(UnsupportedOperation, match="no graph goes over a call"):
        torch.distributed.autograd.context().__enter__()
    x = torch.ones(1, requires_grad=True)
    assert rpc.rpc_sync(to, has_graph, (x * 2,)) == (False, True), "as torch does"
    own = rpc.RRef(x * 2)
    own.backward()
    assert x.grad is not None
    assert x.grad.item() == 2
    with pytest.raises(UnsupportedOperation, match=r"rpc_sync\(\)\.backward\(\)"):
        rpc.remote(to, torch.ones, (1,)).backward()
    with pytest.raises(RuntimeError, match="could not find destination name nobody"):
        rpc.rpc_sync("nobody", torch.add)
    with torch.autograd.profiler_legacy.profile():
        assert rpc.rpc_sync(to, int, ("7",)) == 7
    end()


def test_what_comes_from_torchs_core_is_refused_with_advice(pool: Pool) -> None:
    pool.run(refusals)


def devices(context: Context) -> None:
    shoal.compat.rpc.install()
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{context.scratch}/place", device_maps={"w1": {"cuda:0": "cuda:1"}}
    )
    with pytest.raises(UsageError, match="device_maps"):
        rpc.init_rpc(f"w{context.rank}", rank=context.rank, world_size=2, rpc_backend_options=options)
    assert not rpc._is_current_rpc_agent_set()
    shoal.compat.rpc.uninstall()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the map is right where there are GPUs")
def test_the_agent_gets_torchs_device_maps(pool: Pool) -> None:
    pool.run(devices)


def fail() -> None:
    raise KeyError("key")


def waits(context: Context) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # torch prints what handlers raise
        rpc = begin(context)
        to = f"w{1 - context.rank}"
        mine: torch.futures.Future[int] = torch.futures.Future()
        futures = [rpc.rpc_async(to, int, (str(n),)) for n in range(3)]
        assert isinstance(futures[0], torch._C.Future)
        both = torch.futures.collect_all([*futures, mine])
        assert not both.done()
        mine.set_result(3)
        assert [each.wait() for each in both.wait()] == [0, 1, 2, 3]
        assert torch.futures.wait_all(futures) == [0, 1, 2]
        assert torch.futures.wait_all([mine]) == [3]
        never: torch.futures.Future[int] = torch.futures.Future()
        with pytest.raises(RuntimeError, match="KeyError: 'On WorkerInfo"):
            torch.futures.wait_all([never, rpc.rpc_async(to, fail)])
        with pytest.raises(KeyError, match="On WorkerInfo"):
            rpc.remote(to, fail).to_here()
        end()


def test_futures_of_calls_and_of_torch_are_waited_for_together(pool: Pool) -> None:
    pool.run(waits)


def connects_late(context: Context) -> None:
    from shoal.rpc.connection.links import ConnectionManager

    rpc = begin(context)
    connect = ConnectionManager._connect

    def later(*args: Any) -> Any:
        time.sleep(0.3)
        return connect(*args)

    ConnectionManager._connect = later  # type: ignore[method-assign]
    try:
        made = rpc.remote(f"w{1 - context.rank}", int, args=("7",), timeout=0.1)
    finally:
        ConnectionManager._connect = connect  # type: ignore[method-assign]
    with contextlib.suppress(RuntimeError):  # making it may be late, of which its reference tells
        assert made.to_here() == 7
    end()


def test_the_time_to_connect_is_none_of_the_time_to_make_an_object(pool: Pool) -> None:
    pool.run(connects_late)


def in_order(future: Any, turn: int) -> None:
    noted: list[int] = []

    def note(n: int) -> None:
        time.sleep(0.001 * (4 - n))
        noted.append(n)

    for n in range(4):
        future.add_done_callback(lambda _, n=n: note(n))
    assert future.then(lambda _: list(noted)).wait() == [0, 1, 2, 3]
    # A callback may wait for one that it registers itself.
    assert future.then(lambda future: future.then(lambda _: turn).wait()).wait() == turn


def callbacks(context: Context) -> None:
    rpc = begin(context)
    for turn in range(50):
        in_order(rpc.rpc_async(f"w{1 - context.rank}", time.sleep, (0.001 * (turn % 2),)), turn)
    end()


def test_callbacks_of_a_call_run_one_after_another_as_torchs_do(pool: Pool) -> None:
    pool.run(callbacks)


def dies(context: Context) -> None:
    import os
    import signal

    rpc = begin(context)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(WorkerLost):
        rpc.rpc_sync("w1", time.sleep, (60,))
    with pytest.raises(WorkerLost, match="'w1' ended before shutdown"):
        rpc.shutdown()
    assert not rpc._is_current_rpc_agent_set()
    shoal.compat.rpc.uninstall()


def test_a_dead_worker_is_an_error_and_not_a_hang() -> None:
    with Pool(3, backend=None) as pool:
        pool.start(dies)
        first, killed, last = pool.collect(60.0, patience=60.0)
        assert (first.ok, killed.exitcode, last.ok) == (True, -9, True), (first, last)
