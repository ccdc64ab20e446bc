"""An except clause for what torch raises over Gloo catches what the backend and shoal.distributed raise."""

from __future__ import annotations

import inspect
import warnings

import torch
import torch.distributed as dist

import shoal
import shoal.distributed

from ..support import releases


def ones(*shape, **kwargs):
    return torch.ones(shape or (2,), **kwargs)


def lists(n):
    return [torch.zeros(2) for _ in range(n)]


def other(d, group):
    return 1 - d.get_rank(group)


#: name -> a call that a rank makes alone, with torch.distributed or shoal.distributed and a group of it
MISTAKES = {
    "nothing to reduce": lambda d, g: d.all_reduce(None, group=g),
    "a number to reduce": lambda d, g: d.all_reduce(3, group=g),
    "a list to reduce": lambda d, g: d.all_reduce([ones()], group=g),
    "no such reduction": lambda d, g: d.all_reduce(ones(), "nope", group=g),
    "bits of floats": lambda d, g: d.all_reduce(ones(), d.ReduceOp.BAND, group=g),
    "the largest complex number": lambda d, g: d.all_reduce(
        ones(dtype=torch.complex64), d.ReduceOp.MAX, group=g
    ),
    "the largest of sparse": lambda d, g: d.all_reduce(torch.eye(2).to_sparse(), d.ReduceOp.MAX, group=g),
    "compressed sparse": lambda d, g: d.all_reduce(torch.eye(2).to_sparse_csr(), group=g),
    "an expanded output": lambda d, g: d.all_gather_into_tensor(ones(1).expand(4), ones(), group=g),
    "expanded outputs": lambda d, g: d.all_gather([ones(1).expand(2)] * 2, ones(), group=g),
    "too few outputs": lambda d, g: d.all_gather(lists(1), ones(), group=g),
    "outputs that are too long": lambda d, g: d.all_gather(lists(2), ones(1), group=g),
    "outputs of another dtype": lambda d, g: d.all_gather([ones().int(), ones().int()], ones(), group=g),
    "an output that is too long": lambda d, g: d.all_gather_into_tensor(ones(5), ones(), group=g),
    "an output of another dtype": lambda d, g: d.all_gather_into_tensor(ones(4).int(), ones(), group=g),
    "no outputs": lambda d, g: d.all_gather(None, ones(), group=g),
    "too many inputs": lambda d, g: d.reduce_scatter(ones(), lists(3), group=g),
    "longer than the splits": lambda d, g: d.all_to_all_single(ones(6), ones(4), [2, 2], [2, 2], group=g),
    "shorter than the splits": lambda d, g: d.all_to_all_single(ones(3), ones(4), [2, 2], [2, 2], group=g),
    "too few splits": lambda d, g: d.all_to_all_single(ones(4), ones(4), [4], [4], group=g),
    "no output on the root": lambda d, g: d.gather(ones(), None, d.get_rank(g), group=g),
    "outputs elsewhere": lambda d, g: d.gather(ones(), lists(2), other(d, g), group=g),
    "no input on the root": lambda d, g: d.scatter(ones(), None, d.get_rank(g), group=g),
    "inputs elsewhere": lambda d, g: d.scatter(ones(), lists(2), other(d, g), group=g),
    "no such root": lambda d, g: d.broadcast(ones(), 7, group=g),
    "no such root in the group": lambda d, g: d.broadcast(ones(), group_src=7, group=g),
    "a negative root": lambda d, g: d.broadcast(ones(), -1, group=g),
    "two roots": lambda d, g: d.broadcast(ones(), 0, group_src=0, group=g),
    "no root": lambda d, g: d.broadcast(ones(), group=g),
    "the name of a root": lambda d, g: d.broadcast(ones(), "0", group=g),
    "to itself": lambda d, g: d.send(ones(), d.get_rank(g), group=g),
    "to nobody": lambda d, g: d.send(ones(), 9, group=g),
    "nothing to send": lambda d, g: d.send(None, other(d, g), group=g),
    "from itself": lambda d, g: d.recv(ones(), d.get_rank(g), group=g),
    "a negative tag": lambda d, g: d.isend(ones(), other(d, g), tag=-1, group=g),
    "the name of a tag": lambda d, g: d.isend(ones(), other(d, g), tag="x", group=g),
    "a batch of a collective": lambda d, g: d.P2POp(d.all_reduce, ones(), other(d, g), group=g),
    "a batch of nothing": lambda d, g: d.batch_isend_irecv([None]),
    "no batch": lambda d, g: d.batch_isend_irecv(None),
    "no group": lambda d, g: d.all_reduce(ones(), group="x"),
    "a group of strangers": lambda d, g: d.new_group([0, 9]),
    "a group of twins": lambda d, g: d.new_group([0, 0]),
    "a group with a name for a timeout": lambda d, g: d.new_group(timeout="x"),
    "a second default group": lambda d, g: d.init_process_group("gloo"),
    "no such global rank": lambda d, g: d.get_group_rank(g, 99),
    "no such rank": lambda d, g: d.get_global_rank(g, 99),
    "groups of three": lambda d, g: d.new_subgroups(3),
    "no groups": lambda d, g: d.new_subgroups_by_enumeration([]),
    "groups that overlap": lambda d, g: d.new_subgroups_by_enumeration([[0], [0, 1]]),
    "no place for objects": lambda d, g: d.gather_object(3, None, d.get_rank(g), group=g),
    "no object on the root": lambda d, g: d.scatter_object_list([None], None, d.get_rank(g), group=g),
    "no place for an object": lambda d, g: d.scatter_object_list([], [1, 2], 0, group=g),
    "no list of objects": lambda d, g: d.broadcast_object_list(None, 0, group=g),
    "a name for a timeout": lambda d, g: d.barrier(timeout="x", group=g),
}


if not releases.REFUSES_RANKS_GIVEN_TWICE:
    del MISTAKES["a group of twins"]


def raised(call, *args):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of compressed sparse tensors
            call(*args)
    except Exception as error:
        return error
    return None


def mistakes(context):
    """The mistakes for which an except clause for what Gloo raises would let ours pass."""
    ours, group = shoal.distributed, dist.new_group()
    ours.init_process_group(
        store=dist.PrefixStore("mistakes", context.store), rank=context.rank, world_size=context.size
    )
    try:
        missed = []
        for name, call in MISTAKES.items():
            theirs = raised(call, dist, context.gloo)
            assert theirs is not None, name
            for d, pg in ((dist, group), (ours, ours.group.WORLD)):
                error = raised(call, d, pg)
                if not isinstance(error, type(theirs)):
                    missed.append(f"{name} in {d.__name__}: {theirs!r:.80} there, {error!r:.80} here")
        assert not missed, "\n".join(missed)
        for d, pg in ((dist, context.gloo), (dist, group), (ours, ours.group.WORLD)):
            x = torch.ones(1)
            d.all_reduce(x, group=pg)
            assert x.item() == context.size
    finally:
        ours.destroy_process_group()
    dist.destroy_process_group(group)


def test_an_except_clause_for_torchs_errors_catches_ours(ranks):
    ranks(2).run(mistakes)


def test_all_errors_are_runtime_errors():
    classes = {value for value in vars(shoal.errors).values() if inspect.isclass(value)}
    errors = {value for value in classes if issubclass(value, BaseException)}
    assert len(errors) > 20
    assert all(issubclass(error, RuntimeError) for error in errors)
