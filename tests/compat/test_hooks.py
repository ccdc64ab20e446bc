"""Hooks around operations, NaN checks and torch's other hooks, beside Gloo (torch 2.14 and later)."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from shoal import UnsupportedOperation, UsageError

from ..support import releases

needs_hooks = pytest.mark.skipif(not releases.HOOKS, reason="this torch has no hooks around operations")


def ones(*shape):
    return torch.ones(shape or (3,))


def lists(n, *shape):
    return [ones(*shape) for _ in range(n)]


def pairs(group, size):
    """Send to the next rank and receive from the one before, in each of torch's ways."""
    rank = dist.get_rank(group)
    there, before = (rank + 1) % size, (rank - 1) % size
    for source in (before, None):
        sent = dist.isend(ones(), there, group=group, tag=3)
        dist.recv(ones(), source, group=group, tag=3)
        sent.wait()
    operations = [dist.P2POp(dist.isend, ones(), there, group), dist.P2POp(dist.irecv, ones(), before, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def rooted(group, size):
    for root in (0, size - 1):
        here = dist.get_rank(group) == root
        dist.broadcast(ones(), root, group=group)
        dist.reduce(ones(), root, group=group)
        dist.gather(ones(), lists(size) if here else None, root, group=group)
        dist.scatter(ones(), lists(size) if here else None, root, group=group)


def handles(group, size):
    dist.all_reduce(ones(), group=group, async_op=True).wait()
    dist.broadcast(ones(), 0, group=group, async_op=True).wait()
    dist.all_gather(lists(size), ones(), group=group, async_op=True).wait()
    releases.all_gather_single(ones(3 * size), ones(), group=group, async_op=True).wait()
    dist.barrier(group, async_op=True).wait()


def group_object(group, size):
    """The methods of the group object, with an options object and without."""
    group.allreduce([ones()]).wait()
    group.allreduce(ones(), dist.ReduceOp.MAX).wait()
    group.broadcast(ones(), root=1).wait()
    group.broadcast([ones()], dist.BroadcastOptions()).wait()
    group.reduce(ones(), root=1).wait()
    group.allgather([lists(size)], [ones()]).wait()
    group.gather([lists(size)] if dist.get_rank(group) == 0 else [], [ones()]).wait()
    group.alltoall_base(ones(size), ones(size), [], []).wait()
    group.allgather_into_tensor_coalesced(lists(2, size), lists(2, 1)).wait()
    group.barrier().wait()


def functions(group, size):
    """Functional collectives, which call the group from C++; each result is an input again."""
    x = functional.all_reduce(ones(2 * size), "sum", group)
    x = functional.reduce_scatter_tensor(x, "sum", 0, group)
    x = functional.all_gather_tensor(x, 0, group)
    x = functional.all_to_all_single(x, None, None, group)
    x = functional.broadcast(x, 0, group)
    for y in functional.all_reduce_coalesced([x, ones()], "sum", group):
        y.wait()


#: name -> function of a group and its size
OPERATIONS = {
    "all_reduce": lambda g, n: dist.all_reduce(ones(), dist.ReduceOp.MAX, group=g),
    "all_reduce of complex numbers": lambda g, n: dist.all_reduce(ones().to(torch.complex64), group=g),
    "all_reduce_coalesced": lambda g, n: dist.all_reduce_coalesced(lists(2), group=g),
    "all_gather": lambda g, n: dist.all_gather(lists(n), ones(), group=g),
    "all_gather_coalesced": lambda g, n: dist.all_gather_coalesced([lists(2)] * n, lists(2), group=g),
    "all_gather_single": lambda g, n: releases.all_gather_single(ones(3 * n), ones(), group=g),
    "reduce_scatter": lambda g, n: dist.reduce_scatter(ones(), lists(n), group=g),
    "reduce_scatter_single": lambda g, n: releases.reduce_scatter_single(ones(), ones(3 * n), group=g),
    "all_to_all": lambda g, n: dist.all_to_all(lists(n), lists(n), group=g),
    "all_to_all_single": lambda g, n: dist.all_to_all_single(ones(n), ones(n), group=g),
    "rooted": rooted,
    "pairs": pairs,
    "objects": lambda g, n: dist.all_gather_object([None] * n, "x" * 10, group=g),
    "barrier": lambda g, n: dist.barrier(g),
    "monitored_barrier": lambda g, n: dist.monitored_barrier(g),
    "handles": handles,
    "group object": group_object,
    "functional": functions,
}


class Recorder:
    """Writes down the arguments of all hooks of a group."""

    def __init__(self, group):
        self.events = []
        self._group = group
        group.register_pre_hook(7, self._before)
        group.register_post_hook(7, self._after)

    def remove(self):
        self._group.unregister_pre_hook(7)
        self._group.unregister_post_hook(7)

    def _before(self, args):
        tensors = [
            [(list(x.shape), x.dtype) for x in found] for found in (args.input_tensors, args.output_tensors)
        ]
        self.events.append(("pre", args.name, args.async_op, tensors, args.root, args.op_id))

    def _after(self, args):
        assert isinstance(args.work, dist.Work)
        self.events.append(("post", args.name, args.async_op, args.op_id))


def compared(context, name):
    found = []
    for made in ("gloo", "shoal"):
        group = dist.new_group(backend=made)
        recorder = Recorder(group)
        OPERATIONS[name](group, context.size)
        recorder.remove()
        count = len(recorder.events)
        dist.all_reduce(ones(), group=group)
        assert len(recorder.events) == count
        again = Recorder(group)
        dist.all_reduce(ones(), group=group)
        found.append(recorder.events + again.events)
        again.remove()
        dist.destroy_process_group(group)
    assert found[1] == found[0]
    assert len(found[0]) > 2 or name == "monitored_barrier"


@needs_hooks
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_hooks_get_the_same_as_with_gloo(ranks, size, name):
    ranks(size).run(compared, name)


def gathered(context):
    events = []
    for group in (context.gloo, context.group):
        recorder = Recorder(group)
        output = ones(2 * context.size) if context.rank == 1 else None
        with contextlib.suppress(RuntimeError):  # Gloo has no gather_single, and refuses after the first hook
            releases.gather_single(ones(2), output, 1, group=group)
        recorder.remove()
        events.append(recorder.events[0][:-1])
    assert events[0] == events[1]


@needs_hooks
def test_hooks_get_the_same_of_gather_single_as_with_gloo(ranks):
    ranks(2).run(gathered)


def calls(group):
    called = []
    for hook_id in (5, -1, 3):
        group.register_pre_hook(hook_id, lambda args, i=hook_id: called.append(("pre", i)))
        group.register_post_hook(hook_id, lambda args, i=hook_id: called.append(("post", i)))
    group.register_pre_hook(3, lambda args: called.append(("pre", "another")))
    group.unregister_post_hook(5)
    group.unregister_pre_hook(77)
    dist.all_reduce(ones(), group=group)
    return called


def order(context):
    expected = [("pre", -1), ("pre", "another"), ("pre", 5), ("post", -1), ("post", 3)]
    for made in ("gloo", "shoal"):
        group = dist.new_group(backend=made)
        called = calls(group)
        assert sorted(called, key=str) == sorted(expected, key=str)
        if made == "shoal" or releases.HOOKS_IN_ORDER:
            assert called == expected
        dist.destroy_process_group(group)


@needs_hooks
def test_hooks_are_called_in_the_order_of_their_ids(ranks):
    ranks(2).run(order)


def refuse(args):
    raise KeyError("a hook refused")


def raising(context):
    for made in ("gloo", "shoal"):
        group = dist.new_group(backend=made)
        recorder = Recorder(group)
        x = ones()
        group.register_pre_hook(1, refuse)
        with pytest.raises(KeyError, match="a hook refused"):
            dist.all_reduce(x, group=group)
        assert x.tolist() == [1, 1, 1]
        assert recorder.events in ([], recorder.events[:1])  # torch 2.14 has no order over Gloo
        group.unregister_pre_hook(1)
        recorder.events.clear()
        group.register_post_hook(1, refuse)
        with pytest.raises(KeyError, match="a hook refused"):
            dist.all_reduce(x, group=group)
        group.unregister_post_hook(1)
        dist.barrier(group)
        assert x.tolist() == [context.size] * 3  # it was issued
        assert [event[-1] for event in recorder.events if event[0] == "pre"] == [1, 2]
        dist.destroy_process_group(group)


@needs_hooks
def test_an_exception_before_an_operation_prevents_it(ranks):
    ranks(2).run(raising)


def given(context):
    group, seen = context.group, []
    group.register_pre_hook(0, seen.append)
    group.register_post_hook(0, seen.append)
    x, out = torch.full((3,), 1.0 + context.rank), ones(3 * context.size)
    work = releases.all_gather_single(out, x, group=group, async_op=True)
    work.wait()
    group.unregister_pre_hook(0)
    group.unregister_post_hook(0)
    before, after = seen
    assert [y.data_ptr() for y in before.input_tensors] == [x.data_ptr()]
    assert [y.data_ptr() for y in before.output_tensors] == [out.data_ptr()]
    assert after.work is work
    assert after.op_id == before.op_id
    with pytest.raises(UsageError, match="an int and a function"):
        group.register_pre_hook("first", refuse)
    with pytest.raises(UsageError, match="an int and a function"):
        group.register_post_hook(1, None)


@needs_hooks
def test_hooks_get_the_tensors_and_the_work_themselves(ranks):
    ranks(2).run(given)


def freed(context):
    group = dist.new_group()
    group.register_pre_hook(0, lambda args, kept=group: None)
    releases.NanCheckHook.attach(group)
    dist.all_reduce(ones(), group=group)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None


@needs_hooks
def test_a_group_with_hooks_is_freed(ranks):
    ranks(2).run(freed)


def training(context):
    names = []
    for made in ("gloo", "shoal"):
        group = dist.new_group(backend=made)
        model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        recorder = Recorder(group)
        model(ones(4, 3)).sum().backward()
        recorder.remove()
        names.append(recorder.events)
        group.register_pre_hook(1, refuse)
        with pytest.raises((KeyError, RuntimeError), match="a hook refused"):
            model(ones(4, 3)).sum().backward()
        group.unregister_pre_hook(1)
        del model
        gc.collect()
        dist.destroy_process_group(group)
    assert names[0] == names[1]
    assert names[0][0][1].name == "ALLREDUCE"


@needs_hooks
def test_hooks_see_what_the_reducer_of_ddp_issues(ranks):
    ranks(2).run(training)


@pytest.mark.skipif(releases.HOOKS, reason="this torch has hooks around operations")
def test_releases_without_hooks_are_named(ranks):
    ranks(2).run(without_hooks)


def without_hooks(context):
    with pytest.raises(UnsupportedOperation, match=r"torch 2\.14 or later"):
        context.group.register_pre_hook(1, refuse)
    dist.all_reduce(ones())


# -- NaN checks ----------------------------------------------------------------------------------


def with_nan(dtype=torch.float32):
    return torch.tensor([1.0, float("nan")]).to(dtype)


NAN = "NaN found in input tensor"

#: name -> function of a group; each sends NaN from every rank
SENDING = {
    "all_reduce": lambda g: dist.all_reduce(with_nan(), group=g),
    "float16": lambda g: dist.all_reduce(with_nan(torch.float16), group=g),
    "bfloat16": lambda g: dist.all_reduce(with_nan(torch.bfloat16), group=g),
    "float8": lambda g: dist.broadcast(with_nan(torch.float8_e5m2), dist.get_rank(g), group=g),
    "complex": lambda g: dist.all_reduce(with_nan(torch.complex64), group=g),
    "several": lambda g: dist.all_reduce_coalesced([ones(), with_nan()], group=g),
    "all_gather": lambda g: dist.all_gather([ones(2), ones(2)], with_nan(), group=g),
    "scatter": lambda g: dist.scatter(ones(2), [ones(2), with_nan()], dist.get_rank(g), group=g),
    "send": lambda g: dist.send(with_nan(), 1 - dist.get_rank(g), group=g),
    "functional": lambda g: functional.all_reduce(with_nan(), "sum", g),
}


def refused(context, attach):
    for made in ("gloo", "shoal"):
        group = attach(made)
        for call in SENDING.values():
            with pytest.raises(RuntimeError, match=NAN):
                call(group)
            dist.barrier(group)
        # What a rank receives is not checked.
        x = with_nan() if context.rank else ones(2)
        dist.broadcast(x, 0, group=group)
        assert x.tolist() == [1, 1]
        dist.all_gather([with_nan(), with_nan()], ones(2), group=group)
        dist.all_reduce(torch.ones(2, dtype=torch.int64), group=group)
        # A rank that corrects its tensor takes part.
        x = with_nan() if context.rank else ones(2)
        if context.rank:
            with pytest.raises(RuntimeError, match=NAN):
                dist.all_reduce(x, group=group)
            x.fill_(1)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2, 2]
        dist.destroy_process_group(group)


def attached(made):
    group = dist.new_group(backend=made)
    releases.NanCheckHook.attach(group)
    return group


def by_environment(made):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        return dist.new_group(backend=made)


@needs_hooks
@pytest.mark.parametrize("attach", [attached, by_environment])
def test_a_nan_is_refused_before_anything_is_sent(ranks, attach):
    ranks(2).run(refused, attach)


def words(context):
    check = releases.NanCheckHook.attach(context.group)
    with pytest.raises(UsageError, match=rf"ALLREDUCE on rank {context.rank}: {NAN}.*shape \[2\]"):
        dist.all_reduce(with_nan())
    sparse = torch.sparse_coo_tensor([[0]], [float("nan")], (3,), check_invariants=False)
    with pytest.raises(UsageError, match=NAN):
        dist.all_reduce(sparse)
    other = releases.NanCheckHook.attach(context.group)
    check.remove()
    check.remove()
    with pytest.raises(UsageError, match=NAN):
        dist.all_reduce(with_nan())
    other.remove()
    x = with_nan()
    dist.all_reduce(x)
    assert x[1].isnan()
    assert not context.group._hooked


@needs_hooks
def test_a_nan_check_names_the_operation_and_can_be_removed(ranks):
    ranks(2).run(words)


# -- torch's other hooks -------------------------------------------------------------------------


def other_hooks(context):
    group = context.group
    if releases.FlightRecorderHook is not None:
        with pytest.raises(UnsupportedOperation, match=r"group\.group\.recorder"):
            releases.FlightRecorderHook.attach(group)
        releases.FlightRecorderHook.attach(context.gloo).remove()
    for register in (
        lambda: group.register_abort_hook(1, lambda: None),
        lambda: group.unregister_abort_hook(1),
        lambda: group._register_on_completion_hook(print),
    ):
        with pytest.raises(UnsupportedOperation, match="the backend 'shoal' has no such hooks"):
            register()
    assert group._has_hooks() is False
    group._wait_for_pending_works()
    dist.all_reduce(ones())


def test_hooks_that_need_a_backend_in_cpp_are_refused(ranks):
    ranks(2).run(other_hooks)
