"""Members that die while a group is reconfigured, and what reconfigures leave behind."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shoal import PeerLost, ProcessGroup, UsageError
from shoal.common.process_identity import ProcessIdentity
from shoal.errors import RendezvousError, ShoalError
from shoal.testing import Network, no_leaks, processes
from shoal.testing.network import why_unavailable

from ..support import releases
from ..support.waiting import until
from .members import LIMIT, SOON, Member, joined, parts, pid_of, world_of
from .pool import Pool

pytestmark = pytest.mark.skipif(
    not releases.HAS_RECONFIGURE, reason="torch.distributed._reconfigure exists from torch 2.14 on"
)


# -- deaths --------------------------------------------------------------------------------------


def await_end_of(handle):
    """Wait until the process that a handle belongs to has ended."""
    until(lambda: ProcessIdentity(parts(handle)["machine"], parts(handle)["process"]).is_dead())


def survivors_of(context, connected, when):
    me = Member(context)
    if connected:
        me.reconfigure(1, "first")
        me.check(4, context.rank)
    handles = me.handles("dying")
    pid = pid_of(handles[2])
    if context.rank == 2:
        if when == "in its call":
            dist._reconfigure(2, handles)
        if when != "before its call":
            me.store.wait([f"called {rank}" for rank in (0, 1, 3)])
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "before its call":
        await_end_of(handles[2])
    if when == "in its call" and context.rank == 3:  # somebody must be missing
        me.store.set("called 3", "")
        await_end_of(handles[2])
    began = time.monotonic()
    work = dist._reconfigure(2, handles)
    me.store.set(f"called {context.rank}", "")
    if when != "before its call":
        await_end_of(handles[2])
        began = time.monotonic()
    with pytest.raises((RendezvousError, PeerLost)) as raised:
        work.wait()
    took = time.monotonic() - began
    text = str(raised.value)
    assert re.search(rf"rank 2 (is|\()\s?process {pid} on ", text), text
    assert took < SOON
    with pytest.raises(UsageError, match="the last reconfigure failed"):
        dist.barrier()
    me.reconfigure(3, "survivors", [0, 1, 3])
    me.check(3, [0, 1, 3].index(context.rank))
    me.together("end", [0, 1, 3])
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize("when", ["before its call", "before it calls", "in its call"])
@pytest.mark.parametrize("connected", [False, True])
def test_a_member_that_dies_is_named_and_the_others_go_on(connected, when):
    with Pool(4, backend=None) as pool:
        pool.start(survivors_of, connected, when)
        outcomes = pool.collect(patience=60.0)
        assert outcomes[2].exitcode == -signal.SIGKILL
        for rank in (0, 1, 3):
            assert outcomes[rank].ok, outcomes[rank]


def without_the_store(context):
    me = Member(context)
    me.reconfigure(1, "first")
    handles = me.handles("dying")
    if context.rank == 0:  # which serves the store
        me.store.wait(["got 1", "got 2"])
        os.kill(os.getpid(), signal.SIGKILL)
    me.store.set(f"got {context.rank}", "")
    await_end_of(handles[0])
    dist._reconfigure(2, handles[1:]).wait()
    me.check(2, context.rank - 1)
    dist.group.WORLD.shutdown()


def test_survivors_go_on_without_the_store_of_a_member_that_died():
    with Pool(3, backend=None) as pool:
        pool.start(without_the_store)
        outcomes = pool.collect(patience=60.0)
        assert outcomes[0].exitcode == -signal.SIGKILL
        for rank in (1, 2):
            assert outcomes[rank].ok, outcomes[rank]


def cut_off(context):
    """Ranks 0 and 1 lose each other, live, and share memory."""
    with joined(context) as me:
        me.reconfigure(1, "first")
        world = world_of(dist._get_reconfigure_handle())
        assert world is not None
        base = dist.group.WORLD._reconfigurer._connections.base
        before = me.handles("before")
        if context.rank == 0:
            base._links.backend.disconnect(1)
        deadline = time.monotonic() + 20
        while not base._links.lost():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        me.together("noticed")
        with pytest.raises(ShoalError):
            dist._reconfigure(2, before).wait()
        me.together("failed")
        handles = me.handles("after")
        assert None in map(world_of, handles)
        dist._reconfigure(3, handles).wait()
        me.check(3, context.rank)
        assert dist.group.WORLD._reconfigurer._connections.base is not base


def test_living_members_that_lost_each_other_connect_anew(three):
    three.run(cut_off)


def on_other_hosts(group, address):
    """Rank 2 of three processes on three hosts dies in a call that a fourth has not made."""
    if group.rank == 0:
        server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        group.store.set("port", str(server.port))
    store = dist.TCPStore(address, int(group.store.get("port")), is_master=False)
    dist.init_process_group(
        "shoal", store=dist.PrefixStore("group", store), rank=group.rank, world_size=4, timeout=LIMIT,
        enable_reconfigure=True,
    )  # fmt: skip

    def handles(key, ranks):
        store.set(f"{key}/{group.rank}", dist._get_reconfigure_handle())
        return [store.get(f"{key}/{rank}").decode() for rank in ranks]

    if group.rank < 3:
        dist._reconfigure(1, handles("first", range(3))).wait()
    four = handles("second", range(4))
    if group.rank == 3:
        store.wait(["over 0", "over 1"])
        return None
    if group.rank == 2:
        store.wait(["called 0", "called 1"])
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist._reconfigure(2, four)
    store.set(f"called {group.rank}", "")
    with pytest.raises(RendezvousError) as raised:
        work.wait()
    at = time.monotonic()
    dist._reconfigure(3, handles("third", range(2))).wait()
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    store.set(f"over {group.rank}", "")
    store.wait(["over 0", "over 1"])
    dist.group.WORLD.shutdown()
    return str(raised.value), at


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")
def test_a_member_that_dies_on_another_host_is_named():
    with (
        Network("a", "b", "c", "d") as network,
        processes(on_other_hosts, 4, network.address("a"), hosts="abcd", network=network) as ranks,
    ):
        outcomes = ranks.join()
    assert outcomes[2].exitcode == -signal.SIGKILL
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank]
        text, at = outcomes[rank].value
        assert re.search(r"rank 2 \(process \d+ on .*\) was lost", text), text
        assert at - outcomes[2].at < SOON


def across_a_cut(group, address):
    """Two processes on two hosts lose each other, and meet again."""
    if group.rank == 0:
        server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        group.store.set("port", str(server.port))
    store = dist.TCPStore(address, int(group.store.get("port")), is_master=False)
    dist.init_process_group(
        "shoal", store=dist.PrefixStore("group", store), rank=group.rank, world_size=2, timeout=LIMIT,
        enable_reconfigure=True, pg_options={"heartbeat_timeout": 1.0},
    )  # fmt: skip

    def handles(key):
        group.store.set(f"{key}/{group.rank}", dist._get_reconfigure_handle())
        return [group.store.get(f"{key}/{rank}").decode() for rank in range(2)]

    dist._reconfigure(1, handles("first")).wait()
    before = handles("before")
    group.store.set(f"ready {group.rank}", "")
    with contextlib.suppress(PeerLost):
        while True:
            dist.barrier()
    group.store.set(f"noticed {group.rank}", "")
    group.store.get("healed")
    with pytest.raises(PeerLost):
        dist._reconfigure(2, before).wait()
    after = handles("after")
    assert [parts(each)["lost"] for each in after] == [[1], [0]]
    dist._reconfigure(3, after).wait()
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    group.store.set(f"over {group.rank}", "")
    group.store.wait(["over 0", "over 1"])
    dist.group.WORLD.shutdown()


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")
def test_members_on_two_hosts_can_meet_again_after_a_cut():
    with (
        Network("a", "b") as network,
        processes(across_a_cut, 2, network.address("a"), hosts="ab", network=network) as ranks,
    ):
        ranks.store.wait(["ready 0", "ready 1"])
        network.drop("a", "b")
        ranks.store.wait(["noticed 0", "noticed 1"])
        network.heal()
        ranks.store.set("healed", b"")
        outcomes = ranks.join()
    for outcome in outcomes:
        assert outcome.ok, outcome


# -- what is left behind -------------------------------------------------------------------------


def many_times(context):
    with joined(context) as me:
        me.reconfigure(0, "warm")
        me.check(3, context.rank)
        with no_leaks():
            for uuid in range(1, 40):
                alone = uuid % 3 == 0
                me.reconfigure(
                    10 * uuid + context.rank * alone, f"round {uuid}", [context.rank] if alone else None
                )
                x = torch.ones(100)
                dist.all_reduce(x)
                assert x[0] == (1 if alone else 3)
            assert len([each for each in gc.get_objects() if isinstance(each, ProcessGroup)]) <= 4
            me.reconfigure(1000, "end")
            me.together("end")
            backend = dist.group.WORLD._reconfigurer._connections.base._links.backend
            held = backend.held()
            for uuid in range(1001, 1040):
                me.reconfigure(uuid, f"same {uuid}")
            assert backend.held()[0] <= held[0] + 3
            assert len(dist.group.WORLD._reconfigurer._connections.base._made) <= 1


def failed_times(context):
    with joined(context) as me:
        me.reconfigure(0, "warm")
        with no_leaks():
            for uuid in range(1, 6):
                me.together(f"failing {uuid}")
                handles = me.handles(f"round {uuid}")
                if context.rank < 2:
                    work = dist._reconfigure(uuid, handles, timeout=datetime.timedelta(seconds=0.05))
                    with pytest.raises(ShoalError):
                        work.wait()
                    del work
                me.together(f"failed {uuid}")
                me.reconfigure(100 + uuid, f"again {uuid}")
                me.check(3, context.rank)


def begin_and_end(context):
    for destroy in (dist.destroy_process_group, dist.distributed_c10d._abort_process_group):
        for connected in (False, True):
            me = Member(context)
            if connected:
                me.reconfigure(1, f"first {destroy.__name__}")
            handles = me.handles(f"pending {destroy.__name__} {connected}")
            if context.rank == 0:
                dist._reconfigure(2, handles)  # nobody else comes
            me.together(f"end {destroy.__name__} {connected}")
            destroy()
            del me
            gc.collect()
            context.scratch = context.scratch.with_name(context.scratch.name + "+")


def leaving(context):
    begin_and_end(context)
    with no_leaks():
        begin_and_end(context)


def test_many_reconfigures_leave_nothing_behind(three):
    three.run(many_times)


def test_reconfigures_that_fail_leave_nothing_behind(three):
    three.run(failed_times)


def test_the_end_of_a_process_group_ends_its_reconfigure_and_leaves_nothing_behind(three):
    three.run(leaving)
