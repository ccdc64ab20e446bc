"""Processes whose group is reconfigured, for tests."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json

import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=30)
#: seconds in which the survivors must have an error; a second, and what a machine under load adds to it
SOON = 5.0


class Member:
    """One process in a test: its process group, and a store to exchange handles with the others."""

    def __init__(self, context):
        self.rank, self.size = context.rank, context.size
        self.store = dist.PrefixStore(f"exchange/{context.scratch.name}", context.store)
        dist.init_process_group(
            "shoal", store=dist.PrefixStore(f"group/{context.scratch.name}", context.store),
            rank=context.rank, world_size=context.size, timeout=LIMIT, enable_reconfigure=True,
        )  # fmt: skip

    def handles(self, key, ranks=None):
        """The present handles of some processes, this one among them."""
        self.store.set(f"{key}/{self.rank}", dist._get_reconfigure_handle())
        among = range(self.size) if ranks is None else ranks
        return [self.store.get(f"{key}/{rank}").decode() for rank in among]

    def together(self, key, ranks=None):
        """Wait until all processes are here."""
        self.handles(f"together/{key}", ranks)

    def reconfigure(self, uuid, key, ranks=None):
        """Exchange handles, and make a group of these processes."""
        dist._reconfigure(uuid, self.handles(key, ranks), timeout=LIMIT).wait()

    def check(self, size, rank):
        """The group has this size, this process this rank, and collectives and messages arrive."""
        assert (dist.get_world_size(), dist.get_rank()) == (size, rank)
        x = torch.full((4,), 2.0**rank)
        dist.all_reduce(x)
        assert x.tolist() == [2.0**size - 1] * 4
        y = torch.tensor([float(rank)])
        dist.broadcast(y, group_src=size - 1)
        assert y.item() == size - 1
        if size > 1:
            sent, received = torch.tensor([rank]), torch.tensor([-1])
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, (rank + 1) % size),
                    dist.P2POp(dist.irecv, received, (rank - 1) % size),
                ]
            )
            for work in works:
                work.wait()
            assert received.item() == (rank - 1) % size


@contextlib.contextmanager
def joined(context):
    """A :class:`Member`, which leaves at the end."""
    member = Member(context)
    try:
        yield member
    finally:
        dist.destroy_process_group()
        gc.collect()


def parts(handle):
    """The attributes of a handle."""
    return json.loads(handle.removeprefix("shoal:1:"))


def world_of(handle):
    """The connections that a handle offers; None: none."""
    return parts(handle)["world"]


def pid_of(handle):
    """The id of the process that a handle belongs to."""
    return int(parts(handle)["process"].split("/")[1])
