"""Ways to begin and to end: init methods, stores, once more after the end, ranks that die."""

from __future__ import annotations

import datetime
import gc
import os

import pytest
import torch
import torch.distributed as dist

from shoal import PeerLost, UsageError
from shoal.errors import RendezvousTimeout
from shoal.testing import no_leaks
from tests.support.ports import free_port

from .pool import Pool


@pytest.fixture(scope="module")
def bare():
    """Two processes without a group, for functions that make and destroy the default one."""
    with Pool(2, backend=None) as pool:
        yield pool
        pool.close()


def check(context):
    """The default group adds up; destroy it."""
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [float(context.size)] * 3
    group = dist.new_group()
    dist.barrier(group=group)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    gc.collect()


def by_store(context, backend):
    store = dist.PrefixStore(f"by_store/{context.scratch.name}", context.store)

    def once():
        dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.size)
        assert dist.get_backend() == backend
        assert dist.get_backend_config() == "cpu:shoal"
        check(context)

    once()
    with no_leaks():
        for _ in range(3):
            once()


@pytest.mark.parametrize("backend", ["shoal", "cpu:shoal"])
def test_groups_follow_each_other_over_one_store_and_leave_nothing_behind(bare, backend):
    bare.run(by_store, backend)


def works_that_nobody_waits_for(context):
    store = dist.PrefixStore(f"dropped/{context.scratch.name}", context.store)

    def once():
        dist.init_process_group("shoal", store=store, rank=context.rank, world_size=context.size)
        dist.all_reduce(torch.ones(3), async_op=True)
        if context.rank == 0:
            dist.isend(torch.ones(3), 1)
        else:
            dist.irecv(torch.ones(3), 0)
        check(context)

    once()
    with no_leaks():
        for _ in range(3):
            once()


def test_works_that_nobody_waits_for_keep_nothing_of_a_destroyed_group(bare):
    bare.run(works_that_nobody_waits_for)


def timeouts(context):
    """The time that a broadcast has, for each way of saying it; the variable is set while groups are made."""
    store = dist.PrefixStore(f"timeouts/{context.scratch.name}", context.store)
    place = {"store": store, "rank": context.rank, "world_size": context.size}
    found = []
    os.environ["SHOAL_TIMEOUT"] = "77"
    try:
        for given in (None, datetime.timedelta(seconds=88)):
            dist.init_process_group("shoal", timeout=given, **place)
            for group in (dist.group.WORLD, dist.new_group(), dist.new_group(timeout=given)):
                found.append((group._seconds, group.group._timeout))
            dist.destroy_process_group()
    finally:
        del os.environ["SHOAL_TIMEOUT"]
    return found


def test_shoals_variable_is_the_timeout_where_the_program_gives_none(bare):
    expected = [77.0] * 3 + [88.0, 77.0, 88.0]
    assert bare.run(timeouts) == [[(seconds, seconds) for seconds in expected]] * 2


def by_file(context):
    url = f"file://{context.scratch}/meeting"
    dist.init_process_group("shoal", init_method=url, rank=context.rank, world_size=context.size)
    check(context)


def by_file_store(context):
    store = dist.FileStore(str(context.scratch / "store"), context.size)
    dist.init_process_group("shoal", store=store, rank=context.rank, world_size=context.size)
    check(context)


def agreed_port(context):
    """A port that nobody has, equal on all ranks."""
    key = f"port/{context.scratch.name}"
    if context.rank == 0:
        context.store.set(key, str(free_port()))
    return int(context.store.get(key))


def by_tcp(context):
    url = f"tcp://127.0.0.1:{agreed_port(context)}"
    dist.init_process_group("shoal", init_method=url, rank=context.rank, world_size=context.size)
    check(context)


def by_environment(context):
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(agreed_port(context)),
        RANK=str(context.rank),
        WORLD_SIZE=str(context.size),
    )
    dist.init_process_group("shoal")
    check(context)


@pytest.mark.parametrize(
    "how", [by_file, by_file_store, by_tcp, by_environment], ids=lambda how: how.__name__
)
def test_init_methods_of_torch(bare, how):
    bare.run(how)


def alone(context):
    dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(3)
    dist.all_reduce(x)
    outs = [torch.zeros(3)]
    dist.all_gather(outs, x)
    dist.all_reduce(outs[0], async_op=True).wait()
    objects = [None]
    dist.all_gather_object(objects, "one")
    dist.broadcast(x, 0)
    dist.barrier()
    assert (x.tolist(), outs[0].tolist(), objects) == ([1.0] * 3, [1.0] * 3, ["one"])
    dist.destroy_process_group()


def test_a_group_of_one(bare):
    bare.run(alone)


def backend_after_backend(context):
    for number, backend in enumerate(("shoal", "gloo", "shoal")):
        store = dist.PrefixStore(f"after/{context.scratch.name}/{number}", context.store)
        dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.size)
        group = dist.group.WORLD
        other = dist.new_group(backend="gloo" if backend == "shoal" else "shoal")
        for each in (group, other):
            x = torch.ones(2)
            dist.all_reduce(x, group=each)
            assert x.tolist() == [2.0] * 2
        dist.destroy_process_group()


def test_gloo_and_shoal_take_turns_as_the_default(bare):
    bare.run(backend_after_backend)


def wrong(context):
    store = dist.PrefixStore(f"wrong/{context.scratch.name}", context.store)
    for backend in ("cpu:gloo,cuda:shoal", "cpu:shoal,cuda:shoal"):
        with pytest.raises(UsageError, match="CPU"):
            dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.size)
        assert not dist.is_initialized()
    with pytest.raises(UsageError, match="pg_options"):
        dist.init_process_group(
            "shoal", store=store, rank=context.rank, world_size=context.size, pg_options=object()
        )
    dist.init_process_group("shoal", store=store, rank=context.rank, world_size=context.size)
    check(context)


def test_what_cannot_be_made_is_refused_and_the_next_try_works(bare):
    bare.run(wrong)


def nobody_else(context):
    if context.rank == 0:
        with pytest.raises(RendezvousTimeout, match="rank"):
            dist.init_process_group(
                "shoal",
                store=dist.PrefixStore(f"nobody/{context.scratch.name}", context.store),
                rank=0,
                world_size=2,
                timeout=datetime.timedelta(seconds=0.5),
            )
        assert not dist.is_initialized()


def test_a_rank_that_never_comes_is_named(bare):
    bare.run(nobody_else)


# -- ranks that die ------------------------------------------------------------------------------


def survive(context):
    """All but the last rank wait for it; it is killed."""
    last = context.size - 1
    group = dist.new_group()
    other = dist.new_group([0, 1])
    dist.barrier()
    if context.rank == last:
        context.store.wait([f"waiting/{rank}" for rank in range(last)])
        os.kill(os.getpid(), 9)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    context.store.set(f"waiting/{context.rank}", b"")
    with pytest.raises(PeerLost, match=f"rank {last}") as caught:
        work.wait()
    assert caught.value.ranks == (last,)
    with pytest.raises(PeerLost):
        dist.barrier()
    x = torch.ones(1)
    dist.all_reduce(x, group=other)  # the lost rank is no member
    assert x.item() == 2
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    # Those who are left begin anew.
    store = dist.PrefixStore("survivors", context.store)
    dist.init_process_group("shoal", store=store, rank=context.rank, world_size=last)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def test_survivors_hear_of_a_killed_rank_destroy_their_groups_and_begin_anew():
    with Pool(3) as pool:
        pool.start(survive)
        outcomes = pool.collect(patience=60.0)
        assert outcomes[2].exitcode == -9
        assert [outcome.value for outcome in outcomes[:2]] == [2.0, 2.0], outcomes


def die_at_once(context):
    if context.rank == 1:
        os.kill(os.getpid(), 9)
    dist.destroy_process_group()


def test_destroying_after_a_rank_was_killed_does_not_hang():
    with Pool(2) as pool:
        pool.start(die_at_once)
        outcomes = pool.collect(limit=30.0, patience=30.0)
        assert outcomes[0].ok, outcomes[0].describe()
        assert outcomes[1].exitcode == -9
