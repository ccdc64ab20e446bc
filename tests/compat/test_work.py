"""What an asynchronous call gives back, and that it is asynchronous."""

from __future__ import annotations

import datetime
import gc
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

from shoal.compat.work import KeyedFuture
from shoal.future import Future

from ..support import releases
from .both import both
from .values import assert_same, value


def hold_back(context, name):
    """Rank 1 goes on when rank 0 says so: what rank 0 does until then, it does without rank 1."""
    if context.rank == 1:
        context.store.wait([name])


def let_go(context, name):
    if context.rank == 0:
        context.store.set(name, b"")


def late(context, kind):
    gloo = kind != "all_to_all" or releases.GLOO_ALL_TO_ALL
    for number, group in enumerate(both(context, gloo=gloo)):
        name = f"late/{kind}/{context.scratch.name}/{number}"
        x = torch.full((4,), float(context.rank + 1))
        hold_back(context, name)
        work = START[kind](x, group)
        if context.rank == 0:
            assert not work.is_completed()
        let_go(context, name)
        work.wait()
        assert work.is_completed() or group is context.gloo  # which says no after some waits
        if kind == "all_reduce":
            assert_same(x, torch.full((4,), 3.0))


START = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group, async_op=True),
    "reduce": lambda x, group: dist.reduce(x, 0, group=group, async_op=True),
    "broadcast": lambda x, group: dist.broadcast(x, 1, group=group, async_op=True),
    "all_gather": lambda x, group: dist.all_gather(
        [torch.zeros(4), torch.zeros(4)], x, group=group, async_op=True
    ),
    "all_gather_single": lambda x, group: releases.all_gather_single(
        torch.zeros(8), x, group=group, async_op=True
    ),
    "gather": lambda x, group: dist.gather(
        x,
        [torch.zeros(4), torch.zeros(4)] if dist.get_rank() == 0 else None,
        0,
        group=group,
        async_op=True,
    ),
    "scatter": lambda x, group: dist.scatter(
        x, [torch.zeros(4), torch.zeros(4)] if dist.get_rank() == 1 else None, 1, group=group, async_op=True
    ),
    "reduce_scatter": lambda x, group: dist.reduce_scatter(
        torch.zeros(2), list(x.split(2)), group=group, async_op=True
    ),
    "reduce_scatter_single": lambda x, group: releases.reduce_scatter_single(
        torch.zeros(2), x, group=group, async_op=True
    ),
    "all_to_all": lambda x, group: dist.all_to_all(
        [torch.zeros(2), torch.zeros(2)], list(x.split(2)), group=group, async_op=True
    ),
    "all_to_all_single": lambda x, group: dist.all_to_all_single(
        torch.zeros(4), x, group=group, async_op=True
    ),
    "barrier": lambda x, group: dist.barrier(group=group, async_op=True),
    "message": lambda x, group: (
        dist.irecv(x, 1, group=group) if dist.get_rank() == 0 else dist.isend(x, 0, group=group)
    ),
    "strided": lambda x, group: dist.all_reduce(
        torch.zeros(4, 2)[:, 0].copy_(x) if group is dist.group.WORLD else x, group=group, async_op=True
    ),
}


@pytest.mark.parametrize("kind", START)
def test_a_call_returns_at_once_though_a_rank_is_late(ranks, kind):
    ranks(2).run(late, kind)


def reverse(context):
    for group in both(context):
        xs = [value(context.rank, torch.float32, (n + 1,)) for n in range(20)]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
        out = torch.zeros(2 * context.size)
        works.append(releases.all_gather_single(out, torch.ones(2), group=group, async_op=True))
        for work in reversed(works):
            work.wait()
        assert_same(out, torch.ones(2 * context.size))
        for n, x in enumerate(xs):
            assert_same(x, sum(value(rank, torch.float32, (n + 1,)) for rank in range(context.size)))


@pytest.mark.parametrize("size", [2, 4])
def test_several_operations_in_flight_are_waited_for_in_reverse_order(ranks, size):
    ranks(size).run(reverse)


def never_waited(context):
    for group in both(context):
        xs = [torch.ones(3) for _ in range(5)]
        for x in xs:
            dist.all_reduce(x, group=group, async_op=True)
        dist.all_reduce(torch.ones(1), group=group)
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        finished = threading.Event()
        work.get_future().add_done_callback(lambda _, finished=finished: finished.set())
        assert finished.wait(30)  # nobody waits for it, and it completes
        assert work.is_completed() or group is context.gloo  # which may say so a moment later
        assert_same(xs[0], torch.full((3,), float(context.size)))


def test_what_nobody_waits_for_completes(ranks):
    ranks(2).run(never_waited)


def states(context):
    for group in both(context):
        x = torch.ones(3)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work.wait() is True
        assert work.wait(datetime.timedelta(seconds=5)) is True
        assert work.is_completed()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated
            assert work.is_success()
            if group is context.group:  # Gloo's raises TypeError until torch 2.12
                assert work.exception() is None
            (result,) = work.result()
        assert result.data_ptr() == x.data_ptr()
        assert work.get_future().done()
        (result,) = work.get_future().wait()
        assert_same(result, torch.full((3,), 2.0))
        future = work.get_future().then(lambda done: done.value()[0].sum().item())
        assert future.wait() == 6.0
        both_futures = torch.futures.collect_all([future, work.get_future()])
        assert torch.futures.wait_all([future, both_futures])[0] == 6.0
        barrier = dist.barrier(group=group, async_op=True)
        barrier.wait()
        barrier.get_future().wait()


def test_a_finished_work_says_so_in_every_way(ranks):
    ranks(2).run(states)


def with_future(x):
    work = dist.all_reduce(x, async_op=True)
    work.get_future().wait()


def with_callback(x):
    dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()[0].sum()).wait()


USES = [
    dist.all_reduce,
    lambda x: dist.all_reduce(x, async_op=True).wait(),
    lambda x: dist.all_reduce(x[::2]),
    lambda x: dist.all_gather([torch.zeros_like(x) for _ in range(2)], x),
    lambda x: dist.all_reduce_coalesced([x, torch.ones(2)]),
    with_future,
    with_callback,
]


def released(context):
    gc.collect()
    gc.disable()
    try:
        for use in USES:
            x = torch.ones(1000)
            freed = threading.Event()
            weakref.finalize(x, freed.set)
            use(x)
            del x
            assert freed.wait(30)
    finally:
        gc.enable()


def test_memory_is_free_after_an_operation_though_nobody_looks_for_cycles(ranks):
    ranks(2).run(released)


def chained(context):
    """A callback that issues a collective of its own and waits for it, as PowerSGD's hook does."""
    for group in both(context, gloo=False):
        x, y = torch.ones(3), torch.ones(2)

        def again(done, y=y, group=group):
            dist.all_reduce(y, group=group)
            return done.value()[0] + y.sum()

        future = dist.all_reduce(x, group=group, async_op=True).get_future().then(again)
        assert_same(future.wait(), torch.full((3,), 6.0))


def test_a_callback_may_issue_a_collective_and_wait_for_it(ranks):
    ranks(2).run(chained)


def late_wait(context):
    for number, group in enumerate(both(context, gloo=False)):  # it lets all but one wait for ever
        name = f"late_wait/{context.scratch.name}/{number}"
        hold_back(context, name)
        out = torch.zeros(2)
        work = (
            dist.irecv(out, 1, group=group)
            if context.rank == 0
            else dist.isend(torch.ones(2), 0, group=group)
        )
        threads = [threading.Thread(target=work.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        let_go(context, name)
        for thread in threads:
            thread.join()
        if context.rank == 0:
            assert_same(out, torch.ones(2))


def test_several_threads_wait_for_one_operation(ranks):
    ranks(2).run(late_wait)


def coalesced(context, asynchronously):
    size, rank = context.size, context.rank
    everybody = range(size)
    for group in both(context):
        xs = [value(rank, torch.float32, (n,)) for n in (3, 1, 4)]
        with dist._coalescing_manager(group=group, async_ops=asynchronously) as manager:
            for x in xs:
                dist.all_reduce(x, group=group)
        manager.wait()
        for x in xs:
            assert_same(x, sum(value(r, torch.float32, x.shape) for r in everybody))

        outs = [torch.zeros(n * size) for n in (3, 1)]
        with dist._coalescing_manager(group=group, async_ops=asynchronously) as manager:
            for n, out in zip((3, 1), outs, strict=True):
                releases.all_gather_single(out, value(rank, torch.float32, (n,)), group=group)
        manager.wait()
        for n, out in zip((3, 1), outs, strict=True):
            assert_same(out, torch.cat([value(r, torch.float32, (n,)) for r in everybody]))

        outs = [torch.zeros(n) for n in (2, 5)]
        with dist._coalescing_manager(group=group, async_ops=asynchronously) as manager:
            for out in outs:
                releases.reduce_scatter_single(
                    out, value(rank, torch.float32, (len(out) * size,)), dist.ReduceOp.MAX, group=group
                )
        manager.wait()
        for out in outs:
            whole = torch.stack([value(r, torch.float32, (len(out) * size,)) for r in everybody]).amax(0)
            assert_same(out, whole[rank * len(out) : (rank + 1) * len(out)])


@pytest.mark.parametrize("asynchronously", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_coalesced_operations(ranks, size, asynchronously):
    ranks(size).run(coalesced, asynchronously)


def inference(context):
    with torch.inference_mode():
        for group in both(context):
            x = torch.ones(3)
            assert x.is_inference()
            dist.all_reduce(x, group=group)
            assert_same(x, torch.full((3,), 2.0))
            outs = [torch.zeros(3), torch.zeros(3)]
            dist.all_gather(outs, x, group=group, async_op=True).wait()
            assert_same(outs[1], x)
            out = torch.zeros(6)
            releases.all_gather_single(out, x, group=group)
            dist.broadcast(x, 0, group=group)
            dist.all_reduce(x.expand(2, 3).contiguous().t() if group is context.group else x, group=group)
        # What several messages make up is written in callbacks, which the mode does not reach.
        sparse = torch.sparse_coo_tensor([[context.rank]], [1.0], (context.size,), check_invariants=False)
        dist.all_reduce(sparse)
        assert sparse.to_dense().eq(1.0).all()
        pair = [torch.ones(2), torch.ones(2)]
        context.group.allreduce(pair).wait()
        assert all(x.eq(2.0 * context.size).all() for x in pair)


def no_grad(context):
    for group in both(context):
        parameter = torch.nn.Parameter(torch.full((3,), float(context.rank)))
        dist.broadcast(parameter, 1, group=group)
        dist.all_reduce(parameter.data, group=group)
        with torch.no_grad():
            dist.all_reduce(parameter, group=group)
        dist.all_reduce(parameter, group=group)
        assert_same(parameter, torch.full((3,), 8.0))
        if group is not context.gloo:  # which refuses an input that is part of a graph
            y = 2 * parameter
            releases.all_gather_single(torch.zeros(6), y, group=group)
            assert y.requires_grad
        assert parameter.is_leaf


@pytest.mark.parametrize("case", [inference, no_grad], ids=["inference_mode", "no_grad"])
def test_modes_of_autograd(ranks, case):
    ranks(2).run(case)


def threads(context):
    """Three threads, each with a group of its own, at the same time."""
    size = context.size
    for backend in ("shoal", "gloo"):
        groups = [dist.new_group(backend=backend) for _ in range(3)]
        errors = []

        def work(number, group, errors=errors):
            try:
                for step in range(50):
                    x = torch.full((100,), float(context.rank + number + step))
                    dist.all_reduce(x, group=group)
                    assert_same(x, torch.full((100,), float(sum(range(size)) + size * (number + step))))
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=pair) for pair in enumerate(groups)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for group in groups:
            dist.destroy_process_group(group)
        assert not errors, errors


@pytest.mark.parametrize("size", [2, 4])
def test_several_threads_with_groups_of_their_own(ranks, size):
    ranks(size).run(threads)


def test_a_future_of_torch_completes_whatever_a_callback_raised():
    future = Future()
    torchs = KeyedFuture(future, lambda done: done.value())
    then = torchs.then(lambda _: sys.exit(3))
    future.set_result(1)
    assert torch._C.Future.wait(torchs) == 1
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        torch._C.Future.wait(then)
