"""What goes wrong says so on every rank, and breaks the one group that it concerns."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch
import torch.distributed as dist

from shoal import CollectiveMismatch, GroupAborted, GroupError, OperationTimeout, UsageError, WaitTimeout

from ..support import releases
from .test_work import hold_back, let_go

SHORT = datetime.timedelta(seconds=0.3)


def check_others(context, group):
    """The default group still works, the broken one raises, and it can be destroyed."""
    with pytest.raises(GroupError):
        dist.all_reduce(torch.ones(1), group=group)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == context.size
    dist.destroy_process_group(group)
    dist.barrier()


# -- ranks at odds -------------------------------------------------------------------------------


def different_operations(rank, group):
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        releases.reduce_scatter_single(torch.ones(2), torch.ones(2 * dist.get_world_size()), group=group)


def different_reductions(rank, group):
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, group=group)


def different_dtypes(rank, group):
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32), group=group)


def different_shapes(rank, group):
    dist.all_reduce(torch.ones(4 + rank), group=group)


def different_roots(rank, group):
    dist.broadcast(torch.ones(4), rank, group=group)


def barrier_against_all_gather(rank, group):
    if rank == 0:
        dist.barrier(group=group)
    else:
        size = dist.get_world_size()
        dist.all_gather([torch.zeros(2) for _ in range(size)], torch.ones(2), group=group)


MISMATCHES = [
    different_operations,
    different_reductions,
    different_dtypes,
    different_shapes,
    different_roots,
    barrier_against_all_gather,
]


def mismatch(context, case):
    group = dist.new_group()

    def call():
        case(context.rank, group)
        dist.barrier(group=group)  # a rank that had rightly finished hears of it now

    with pytest.raises(CollectiveMismatch, match="rank 0") as caught:
        call()
    assert "rank 1" in str(caught.value)
    check_others(context, group)


@pytest.mark.parametrize("case", MISMATCHES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_call_different_things_all_get_the_table(ranks, size, case):
    ranks(size).run(mismatch, case)


def asynchronous_mismatch(context):
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(4 + context.rank), group=group, async_op=True)
    with pytest.raises(CollectiveMismatch):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), CollectiveMismatch)
    with pytest.raises(CollectiveMismatch):
        work.get_future().wait()
    chained = work.get_future().then(lambda future: future.value())
    with pytest.raises((CollectiveMismatch, RuntimeError), match="rank"):
        chained.wait()
    check_others(context, group)


def test_a_failed_work_says_so_in_every_way(ranks):
    ranks(2).run(asynchronous_mismatch)


def coalesced_mismatch(context):
    group = dist.new_group()

    def call():
        with dist._coalescing_manager(group=group):
            for x in (torch.ones(3), torch.ones(4 + context.rank), torch.ones(5)):
                dist.all_reduce(x, group=group)

    with pytest.raises(CollectiveMismatch):
        call()
    check_others(context, group)


def test_a_mismatch_among_coalesced_operations(ranks):
    ranks(2).run(coalesced_mismatch)


# -- arguments that cannot be right --------------------------------------------------------------


def refused(context):
    size = context.size
    ones = torch.ones(4)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    calls = [
        lambda: releases.all_gather_single(torch.zeros(3), ones),
        lambda: releases.all_gather_single(torch.zeros(4 * size, dtype=torch.int32), ones),
        lambda: dist.all_gather([torch.zeros(4)], ones),
        lambda: dist.all_reduce(torch.ones(3).expand(2, 3)),
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        lambda: dist.all_reduce(freed),
        lambda: dist.group.WORLD.group.all_reduce(None),
        lambda: dist.group.WORLD.group.broadcast(None, 0),
        lambda: dist.group.WORLD.group.all_to_all_single(torch.zeros(size), None),
        lambda: dist.broadcast(freed, 0),
        lambda: releases.all_gather_single(torch.zeros(4 * size), freed),
        lambda: releases.reduce_scatter_single(torch.zeros(5), torch.zeros(size)),
        lambda: dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [size]),
        lambda: dist.broadcast(ones, group_src=size),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.float8_e5m2)),
    ]
    for call in calls:
        with pytest.raises((UsageError, ValueError)):
            call()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size


def test_arguments_that_cannot_be_right_are_refused_and_the_group_goes_on(ranks):
    ranks(2).run(refused)


# -- ranks that do not come ----------------------------------------------------------------------


def missing(context, how):
    name = f"missing/{context.scratch.name}"
    group = dist.new_group(timeout=SHORT if how in ("group", "message") else None)
    hold_back(context, name)
    if context.rank == 0:
        with pytest.raises(OperationTimeout) as caught:
            MISSING[how](group)
        if how != "message":  # which may come from a rank that does other things
            assert caught.value.ranks == (1,)
        assert "0.3 s" in str(caught.value)
    let_go(context, name)
    check_others(context, group)


def set_timeout(group):
    group.set_timeout(SHORT)
    dist.all_reduce(torch.ones(3), group=group)


def with_options(group):
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    group.allreduce([torch.ones(3)], options).wait()


MISSING = {
    "options": with_options,
    "group": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "message": lambda group: dist.recv(torch.ones(3), 1, group=group),
    "barrier": lambda group: (
        dist.barrier(group=group, timeout=SHORT)
        if releases.BARRIER_TIMEOUT
        else group.barrier(timeout=SHORT).wait()
    ),
    "monitored_barrier": lambda group: group.monitored_barrier(SHORT, wait_all_ranks=True),
    "set": set_timeout,
}


@pytest.mark.parametrize("how", MISSING)
def test_a_timeout_names_the_rank_that_did_not_come(ranks, how):
    ranks(2).run(missing, how)


def impatient(context):
    name = f"impatient/{context.scratch.name}"
    hold_back(context, name)
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    if context.rank == 0:
        with pytest.raises(WaitTimeout):
            work.wait(datetime.timedelta(milliseconds=20))
        assert not work.is_completed()
    let_go(context, name)
    work.wait()
    assert x.tolist() == [2.0] * 3


def test_a_wait_that_gave_up_leaves_the_operation_going(ranks):
    ranks(2).run(impatient)


def monitored(context):
    context.group.monitored_barrier(datetime.timedelta(seconds=30))
    context.group.monitored_barrier()
    if releases.MONITORED_BARRIER_FOR_ANY_BACKEND:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    else:
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()


def test_monitored_barrier(ranks):
    ranks(4).run(monitored)


BARRIERS = {
    "group": lambda group: group.monitored_barrier(SHORT),
    "torch": lambda group: dist.monitored_barrier(group, SHORT, wait_all_ranks=True),
}


def absent(context, function):
    name = f"absent/{context.scratch.name}"
    group = dist.new_group()
    hold_back(context, name)
    if context.rank != 1:
        with pytest.raises(OperationTimeout, match=r"0\.3 s") as caught:
            BARRIERS[function](group)
        assert caught.value.ranks == (1,)
    let_go(context, name)
    check_others(context, group)


@pytest.mark.parametrize(
    "function",
    [
        "group",
        pytest.param(
            "torch",
            marks=pytest.mark.skipif(
                not releases.MONITORED_BARRIER_FOR_ANY_BACKEND, reason="torch's function knows Gloo alone"
            ),
        ),
    ],
)
def test_monitored_barrier_names_a_rank_that_does_not_come(ranks, function):
    ranks(4).run(absent, function)


# -- the end of a group --------------------------------------------------------------------------


def aborted(context):
    group = dist.new_group()
    if context.rank == 0:
        context.store.wait([f"aborted/{context.scratch.name}/{rank}" for rank in range(1, context.size)])
        dist.distributed_c10d._abort_process_group(group)
        with pytest.raises((ValueError, GroupError)):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        context.store.set(f"aborted/{context.scratch.name}/{context.rank}", b"")
        with pytest.raises(GroupAborted, match="rank 0"):
            work.wait()
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_abort_on_one_rank_wakes_the_others(ranks, size):
    ranks(size).run(aborted)


def destroyed_early(context):
    """One rank destroys a group in which the others wait for it."""
    group = dist.new_group()
    if context.rank == 0:
        context.store.wait([f"early/{context.scratch.name}/{rank}" for rank in range(1, context.size)])
        dist.destroy_process_group(group)
    else:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        context.store.set(f"early/{context.scratch.name}/{context.rank}", b"")
        with pytest.raises(GroupError, match="rank 0"):
            work.wait()
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_destroys_a_group_ends_the_waiting_of_the_others(ranks, size):
    ranks(size).run(destroyed_early)


def destroyed_in_flight(context):
    """A rank destroys a group with work of its own that is not complete and never will be."""
    group = dist.new_group()
    work = None
    if context.rank == 1:
        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    dist.destroy_process_group(group)
    if work is not None:
        with pytest.raises(GroupError):
            work.wait()
    dist.barrier()


def test_destroying_a_group_with_work_in_flight_does_not_hang(ranks):
    ranks(2).run(destroyed_in_flight, limit=30)


def destroyed_under_a_thread(context):
    """A thread waits for work that will never be complete while the group is destroyed."""
    group = dist.new_group()
    if context.rank == 1:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        caught = []

        def wait():
            try:
                work.wait()
            except GroupError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        dist.destroy_process_group(group)
        thread.join()
        assert len(caught) == 1
    else:
        dist.destroy_process_group(group)
    dist.barrier()


def test_destroying_a_group_ends_the_waiting_of_other_threads(ranks):
    ranks(2).run(destroyed_under_a_thread, limit=30)


def destroyed_in_order(context):
    """What everybody submitted is complete though nobody waited before destroying."""
    group = dist.new_group()
    xs = [torch.ones(100_000) for _ in range(5)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    dist.destroy_process_group(group)
    for work in works:
        work.wait()
    assert all(x.eq(context.size).all() for x in xs)


@pytest.mark.parametrize("size", [2, 4])
def test_what_was_submitted_by_all_is_complete_after_destroying(ranks, size):
    ranks(size).run(destroyed_in_order)
