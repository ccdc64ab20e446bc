"""``init_process_group("shoal", enable_reconfigure=True)``: the members change while the group lives."""

from __future__ import annotations

import datetime
import os
import time
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

from shoal import GroupAborted, UnsupportedOperation, UsageError
from shoal.errors import ShoalError

from ..support import releases
from .members import SOON, joined, pid_of, world_of

pytestmark = pytest.mark.skipif(
    not releases.HAS_RECONFIGURE, reason="torch.distributed._reconfigure exists from torch 2.14 on"
)


# -- who can be a member -------------------------------------------------------------------------


def all_of_them(context):
    with joined(context) as me:
        assert dist._supports_reconfigure()
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.supports_reconfigure
        assert (dist.get_rank(), dist.get_world_size()) == (context.rank, context.size)
        me.reconfigure(1, "first")
        me.check(3, context.rank)
        me.reconfigure(2, "again")
        me.check(3, context.rank)


def test_all_processes_can_be_members_and_can_stay_so(three):
    three.run(all_of_them)


def sum_with_gradients(context):
    with joined(context) as me, warnings.catch_warnings():
        me.reconfigure(1, "gradients")
        warnings.simplefilter("error")
        dist.all_reduce(torch.ones(1, requires_grad=True))


def test_operations_do_not_warn_of_gradients_as_in_any_group_of_torch(three):
    three.run(sum_with_gradients)


def shrink(context, out):
    with joined(context) as me:
        me.reconfigure(1, "all")
        me.check(3, context.rank)
        handles = me.handles("some")
        rest = [rank for rank in range(3) if rank != out]
        if context.rank != out:
            dist._reconfigure(2, [handles[rank] for rank in rest]).wait()
            me.check(2, rest.index(context.rank))
        me.together("end")
        if context.rank == out:  # the group that it has was left by the others
            with pytest.raises(ShoalError):
                dist.barrier()


@pytest.mark.parametrize("out", [0, 1, 2])
def test_a_living_member_can_be_left_out(three, out):
    three.run(shrink, out)


def down_and_up(context):
    with joined(context) as me:
        for uuid in (10, 20):
            me.reconfigure(uuid + context.rank, f"alone {uuid}", [context.rank])
            me.check(1, 0)
            me.reconfigure(uuid + 5, f"all {uuid}")
            me.check(3, context.rank)


def test_groups_of_one_become_one_and_part_again(three):
    three.run(down_and_up)


def late(context):
    with joined(context) as me:
        if context.rank < 2:
            me.reconfigure(1, "two", [0, 1])
            me.check(2, context.rank)
        me.reconfigure(2, "three")
        me.check(3, context.rank)


def test_a_process_can_join_later(three):
    three.run(late)


def merge_and_split(context):
    with joined(context) as me:
        part, size = ([0], 1) if context.rank == 0 else ([1, 2], 2)
        for round in range(2):
            uuid = 10 * round
            me.reconfigure(uuid + part[0], f"parts {round}", part)
            me.check(size, part.index(context.rank))
            me.reconfigure(uuid + 5, f"whole {round}")
            me.check(3, context.rank)


def test_groups_can_merge_and_split(three):
    three.run(merge_and_split)


def other_order(context):
    with joined(context) as me:
        for uuid, order in enumerate(([2, 0, 1], [1, 0, 2])):  # over new connections, and the same ones
            me.reconfigure(uuid, f"order {uuid}", order)
            me.check(3, order.index(context.rank))
        for uuid in (5, 6):
            handles = me.handles(f"set {uuid}")
            dist._reconfigure(uuid, set(handles)).wait()
            me.check(3, context.rank)


def test_the_order_of_a_list_is_that_of_the_ranks_and_a_set_keeps_the_first_ranks(three):
    three.run(other_order)


# -- connections that are used again -------------------------------------------------------------


def reuse(context):
    with joined(context) as me:
        first = me.handles("first")
        assert [world_of(handle) for handle in first] == [None] * 3
        dist._reconfigure(1, first).wait()
        second = me.handles("second")
        assert len({world_of(handle) for handle in second}) == 1
        base = dist.group.WORLD._reconfigurer._connections.base
        dist._reconfigure(2, second).wait()
        assert dist.group.WORLD._reconfigurer._connections.base is base
        me.check(3, context.rank)
        me.together("used again")
        if context.rank < 2:
            me.reconfigure(3, "two", [0, 1])
            assert dist.group.WORLD._reconfigurer._connections.base is base
            me.check(2, context.rank)
        me.together("end")


def test_members_with_common_connections_use_them_again(three):
    three.run(reuse)


def pending_operations(context):
    with joined(context) as me:
        me.reconfigure(1, "first")
        stuck = None
        if context.rank != 2:  # rank 2 never takes part
            stuck = dist.all_reduce(torch.ones(4), async_op=True)
        if context.rank != 2:
            me.reconfigure(2, "two", [0, 1])
            me.check(2, context.rank)
            with pytest.raises(ShoalError):
                stuck.wait()
        me.together("end")


def test_operations_of_the_group_before_do_not_hold_up_the_next(three):
    three.run(pending_operations)


def subgroups(context):
    with joined(context) as me:
        me.reconfigure(1, "first")
        old = dist.new_group([1, 2])
        me.reconfigure(2, "same connections", [2, 1, 0])
        new = dist.new_group([0, 1])  # ranks 2 and 1 of the first group
        for alone in (False, True):
            if alone:
                me.reconfigure(10 + context.rank, "alone", [context.rank])
                me.reconfigure(20, "other connections")
            for group, members in ((old, (1, 2)), (new, (2, 1))):
                if context.rank in members:
                    x = torch.ones(2)
                    dist.all_reduce(x, group=group)
                    assert x.tolist() == [2.0, 2.0]
                    assert group.rank() == members.index(context.rank)
        me.check(3, context.rank)


def test_groups_that_were_made_before_stay_as_they_are(three):
    three.run(subgroups)


def forked(context):
    with joined(context) as me:
        me.reconfigure(1, "first")
        handles = me.handles("second")
        if context.rank == 0:
            work = dist._reconfigure(2, handles)
        me.together("pending")
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                with pytest.raises(ShoalError):
                    dist.barrier()
                with pytest.raises(UsageError, match="forked child"):
                    dist._reconfigure(3, handles)
                os.write(write, b"as expected")
            except BaseException:
                os.write(write, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as file:
            told = file.read()
        _, status = os.waitpid(child, 0)
        assert told == "as expected", told or f"the child ended with status {status}"
        me.together("forked")
        if context.rank != 0:
            work = dist._reconfigure(2, handles)
        work.wait()
        me.check(3, context.rank)


def test_a_forked_child_has_no_part_in_it(three):
    three.run(forked)


# -- asynchrony ----------------------------------------------------------------------------------


def at_once(context):
    with joined(context) as me:
        for uuid in (1, 2):
            handles = me.handles(f"round {uuid}")
            if context.rank == 0:  # the others come when this one has asked whether they have
                work = dist._reconfigure(uuid, handles)
                assert not work.is_completed()
                assert dist.get_world_size() == 3
                me.store.set(f"go {uuid}", "")
            else:
                me.store.get(f"go {uuid}")
                work = dist._reconfigure(uuid, handles)
            x = torch.ones(1)
            dist.all_reduce(x)  # waits for the reconfigure
            assert x.item() == 3
            assert work.is_completed()
            assert work.is_success()
            assert work.wait()
            work.get_future().wait()


def test_reconfigure_returns_at_once_and_operations_wait_for_it(three):
    three.run(at_once)


def superseded(context, connected):
    with joined(context) as me:
        if connected:
            me.reconfigure(1, "first")
        handles = me.handles("wait")
        if context.rank == 2:
            me.together("second")
            me.together("end")
            return
        works = [dist._reconfigure(10, handles)]  # rank 2 does not call it
        me.together("second")
        if context.rank == 0:
            works.append(dist._reconfigure(11, handles[:2]))
        with pytest.raises(
            ShoalError, match=r"rank 0 \(process \d+ on .*\) called reconfigure again, with uuid 11"
        ):
            works[0].wait()
        if context.rank == 1:
            works.append(dist._reconfigure(11, handles[:2]))
        works[1].wait()
        me.check(2, context.rank)
        me.together("end")


@pytest.mark.parametrize("connected", [False, True])
def test_a_second_call_ends_the_first_on_all_members(three, connected):
    three.run(superseded, connected)


# -- failures ------------------------------------------------------------------------------------


def after_abort(context):
    with joined(context) as me:
        me.reconfigure(1, "first")
        before = me.handles("before")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.get_error() == releases.ErrorType.SUCCESS
        backend.abort()
        assert backend.get_error() == releases.ErrorType.SUCCESS
        with pytest.raises(GroupAborted):
            dist.barrier()
        dist._reconfigure(2, before).wait()
        me.check(3, context.rank)
        me.together("checked")
        backend.abort()
        me.reconfigure(3, "after")
        me.check(3, context.rank)


def test_a_group_that_was_aborted_can_be_reconfigured(three):
    three.run(after_abort)


def aborted_meanwhile(context, connected):
    with joined(context) as me:
        if connected:
            me.reconfigure(1, "first")
        handles = me.handles("wait")
        if context.rank < 2:
            work = dist._reconfigure(2, handles)
            me.store.set(f"called {context.rank}", "")
            if context.rank == 0:
                me.store.get("called 1")
                dist.group.WORLD.abort()
            with pytest.raises(ShoalError, match=r"rank 0 \(process \d+ on .*\) aborted the process group"):
                work.wait()
            with pytest.raises(UsageError, match="the last reconfigure failed"):
                dist.barrier()
        me.together("failed")
        me.reconfigure(3, "again")
        me.check(3, context.rank)


@pytest.mark.parametrize("connected", [False, True])
def test_abort_ends_a_reconfigure_for_all_members_and_another_one_can_follow(three, connected):
    three.run(aborted_meanwhile, connected)


def too_late(context, connected):
    with joined(context) as me:
        if connected:
            me.reconfigure(1, "first")
        handles = me.handles("wait")
        if context.rank < 2:
            work = dist._reconfigure(2, handles, timeout=datetime.timedelta(seconds=1.5))
            with pytest.raises(TimeoutError) as raised:
                work.wait()
            pid = pid_of(handles[2])
            assert f"rank 2 is process {pid} on " in str(raised.value)
        me.together("failed")
        me.reconfigure(3, "again")
        me.check(3, context.rank)


@pytest.mark.parametrize("connected", [False, True])
def test_a_member_that_does_not_call_is_named_after_the_timeout(three, connected):
    three.run(too_late, connected)


def mistakes(context):
    with joined(context) as me:
        with pytest.raises(UsageError, match=r"no members before the first torch\.distributed\._reconfigure"):
            dist.barrier()
        with pytest.raises(UsageError, match=r"torch\.distributed\._reconfigure"):
            dist.new_group()
        first = me.handles("first")
        mine = first[context.rank]
        other = first[(context.rank + 1) % 3]

        def refused(uuid, handles, text):
            with pytest.raises(RuntimeError, match=text):
                dist._reconfigure(uuid, handles)

        refused(1, [], "empty")
        refused(1, [other], "the handle of this process .* is not among the 1")
        refused(1, [mine, other, other], "2 handles of process")
        refused(1, [mine, "gloo:0:-1:0:127.0.0.1:29500"], "'gloo:0.*is not a handle of a shoal group; exp")
        refused(1, [mine, mine[:-9]], "is not a handle of a shoal group; expected")
        dist._reconfigure(1, first).wait()  # nothing of that has used the uuid
        refused(1, me.handles("second"), "already used")
        me.check(3, context.rank)  # the group stays
        me.together("checked")
        dist._reconfigure(10 + context.rank, [mine]).wait()  # a handle without connections stays good
        me.check(1, 0)
        stale = me.handles("third")
        me.reconfigure(3, "fourth")
        refused(4, stale, "older than its last reconfigure")
        me.check(3, context.rank)


def alone_under_one_uuid(context):
    """Another process has used the uuid."""
    with joined(context) as me:
        mine = [dist._get_reconfigure_handle()]
        if context.rank == 0:
            dist._reconfigure(1, mine).wait()
        me.together("used")
        if context.rank == 1:
            with pytest.raises(RuntimeError, match="already used"):
                dist._reconfigure(1, mine).wait()
        dist._reconfigure(2 + context.rank, [dist._get_reconfigure_handle()]).wait()
        me.check(1, 0)


def test_calls_that_cannot_be_right_are_refused(three):
    three.run(mistakes)


def test_a_uuid_that_others_have_used_is_refused(three):
    three.run(alone_under_one_uuid)


def different_lists(context, connected):
    with joined(context) as me:
        if connected:
            me.reconfigure(1, "first")
        handles = me.handles("differ")
        began = time.monotonic()
        work = dist._reconfigure(2, handles[:2] if context.rank == 0 else handles)
        with pytest.raises(ShoalError, match=r"other handles|different lists|already used"):
            work.wait()
        assert time.monotonic() - began < SOON
        me.together("failed")
        me.reconfigure(3, "again")
        me.check(3, context.rank)


@pytest.mark.parametrize("connected", [False, True])
def test_members_that_pass_different_lists_are_told(three, connected):
    three.run(different_lists, connected)


def several_backends(context):
    with pytest.raises(UsageError, match="of one backend only"):
        dist.init_process_group(
            "cpu:shoal,cuda:gloo", store=dist.PrefixStore(context.scratch.name, context.store),
            rank=context.rank, world_size=context.size, enable_reconfigure=True,
        )  # fmt: skip
    dist.init_process_group(
        "shoal", store=dist.PrefixStore(f"{context.scratch.name}/plain", context.store),
        rank=context.rank, world_size=context.size,
    )  # fmt: skip
    assert not dist._supports_reconfigure()
    for call in (dist._get_reconfigure_handle, lambda: dist._reconfigure(1, ["x"])):
        with pytest.raises(UnsupportedOperation, match="enable_reconfigure=True"):
            call()
    dist.destroy_process_group()


def test_only_groups_that_were_made_for_it_are_reconfigured(three):
    three.run(several_backends)
