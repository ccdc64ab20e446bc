"""Submitting a large operation only begins it: whoever waits, or the progress thread, does the work.

The ranks here are bare contexts of the core that were never started, so that they have no threads: what an
operation does beyond its submission is done where a test waits for it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shoal import _core
from shoal.spec import DTYPE_CODES, SUM, OpKind

MIB = 2**20
LARGE = 2 * MIB  # float32 elements: 8 MiB
SMALL = 100
TIMEOUT = 60.0
KEYED = -1  # as a number: the operation is matched by its key


@dataclass
class Rank:
    """One rank of a pair: its context and its group."""

    index: int
    context: Any
    group: Any
    kept: list[torch.Tensor] = field(default_factory=list)

    def tensor(self, count: int, registered: bool) -> torch.Tensor:
        if registered:
            return torch.from_dlpack(self.group.allocate(count * 4)).view(torch.float32)
        return torch.empty(count)

    def submit(
        self,
        kind: OpKind,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        number: int,
        *,
        root: int = -1,
    ) -> Any:
        count = 0
        if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST):
            count = (inputs or outputs)[0].numel()
        self.kept += inputs + outputs  # the core reads and writes them without owning them
        parts = [[(x.data_ptr(), x.nbytes) for x in tensors] for tensors in (inputs, outputs)]
        code = DTYPE_CODES[torch.float32]
        sizes = [LARGE] * 2 if kind in (OpKind.GATHER, OpKind.SCATTER) else []
        return self.group.collective(kind, *parts, count, code, SUM.code, root, sizes, number, 5, TIMEOUT)


def _pair(transport: str, lanes: int = 1) -> list[Rank]:
    contexts = [_core.Context.make(rank, 2, 2, 128 * MIB, 128 * MIB, TIMEOUT) for rank in range(2)]
    first, second = contexts
    if transport == "shm":
        ends = [end.detach() for end in socket.socketpair()]
        rings = [context.make_ring() for context in contexts]
        for rank, (mine, theirs) in enumerate(((first, second), (second, first))):
            mine.add_local(
                1 - rank,
                ends[rank],
                theirs.memory_fd,
                theirs.memory_capacity,
                rings[rank],
                rings[1 - rank],
                os.getpid(),
            )
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            a = socket.create_connection(server.getsockname())
            b, _ = server.accept()
        first.add_remote(1, a.detach())
        second.add_remote(0, b.detach())
    hosts = [0, 0] if transport == "shm" else [0, 1]
    return [
        Rank(rank, context, context.group(1, "pair", rank, [0, 1], hosts, lanes))
        for rank, context in enumerate(contexts)
    ]


def _finish(operations: list[Any]) -> None:
    with ThreadPoolExecutor(len(operations)) as pool:
        assert all(pool.map(lambda operation: operation.wait(TIMEOUT), operations))
    for operation in operations:
        assert operation.error() is None


@dataclass
class Submitted:
    """A large operation on its way, and the tensor that it writes."""

    operation: Any
    result: torch.Tensor
    before: float
    after: float

    @property
    def untouched(self) -> bool:
        return bool(self.result.eq(self.before).all())

    @property
    def right(self) -> bool:
        return bool(self.result.eq(self.after).all())


Submit = Callable[[Rank, bool, int], Submitted]

KINDS: dict[str, Submit] = {}


def _kind(submit: Submit) -> Submit:
    KINDS[submit.__name__] = submit
    return submit


@_kind
def all_reduce(rank: Rank, registered: bool, number: int) -> Submitted:
    x = rank.tensor(LARGE, registered).fill_(1)
    return Submitted(rank.submit(OpKind.ALL_REDUCE, [x], [x], number), x, 1, 2)


@_kind
def reduce(rank: Rank, registered: bool, number: int) -> Submitted:
    x = rank.tensor(LARGE, registered).fill_(1)
    outputs = [x] if rank.index == 0 else []
    operation = rank.submit(OpKind.REDUCE, [x], outputs, number, root=0)
    return Submitted(operation, x, 1, 2 - rank.index)


@_kind
def broadcast(rank: Rank, registered: bool, number: int) -> Submitted:
    x = rank.tensor(LARGE, registered).fill_(rank.index)
    inputs = [] if rank.index == 1 else [x]
    return Submitted(rank.submit(OpKind.BROADCAST, inputs, [x], number, root=0), x, rank.index, 0)


@_kind
def all_gather(rank: Rank, registered: bool, number: int) -> Submitted:
    x, out = rank.tensor(LARGE, registered).fill_(3), rank.tensor(2 * LARGE, registered).fill_(0)
    return Submitted(rank.submit(OpKind.ALL_GATHER, [x], [out], number), out, 0, 3)


@_kind
def reduce_scatter(rank: Rank, registered: bool, number: int) -> Submitted:
    x, out = rank.tensor(2 * LARGE, registered).fill_(1), rank.tensor(LARGE, registered).fill_(0)
    return Submitted(rank.submit(OpKind.REDUCE_SCATTER, [x], [out], number), out, 0, 2)


@_kind
def all_to_all(rank: Rank, registered: bool, number: int) -> Submitted:
    x, out = rank.tensor(2 * LARGE, registered).fill_(4), rank.tensor(2 * LARGE, registered).fill_(0)
    return Submitted(rank.submit(OpKind.ALL_TO_ALL, [x], [out], number), out, 0, 4)


@_kind
def gather(rank: Rank, registered: bool, number: int) -> Submitted:
    x, out = rank.tensor(LARGE, registered).fill_(6), rank.tensor(2 * LARGE, registered).fill_(0)
    outputs = list(out.split(LARGE)) if rank.index == 0 else []
    return Submitted(rank.submit(OpKind.GATHER, [x], outputs, number, root=0), out, 0, 6 * (rank.index == 0))


@_kind
def scatter(rank: Rank, registered: bool, number: int) -> Submitted:
    x, out = rank.tensor(2 * LARGE, registered).fill_(8), rank.tensor(LARGE, registered).fill_(0)
    inputs = list(x.split(LARGE)) if rank.index == 0 else []
    rank.kept.append(x)
    return Submitted(rank.submit(OpKind.SCATTER, inputs, [out], number, root=0), out, 0, 8)


@pytest.mark.parametrize(
    ("transport", "registered", "number"),
    [("shm", True, 0), ("shm", False, 0), ("shm", False, KEYED), ("tcp", False, 0)],
    ids=["registered", "ordinary", "keyed", "tcp"],
)
@pytest.mark.parametrize("name", KINDS)
def test_who_submits_a_large_operation_last_does_none_of_its_work(
    name: str, transport: str, registered: bool, number: int
) -> None:
    ranks = _pair(transport)
    submitted = [KINDS[name](rank, registered, number) for rank in ranks]
    assert all(one.untouched and not one.operation.done() for one in submitted)
    # Staging buffers are made for the first bytes that go into them.
    assert len({rank.context.memory_in_use for rank in ranks}) == 1
    _finish([one.operation for one in submitted])
    assert all(one.right for one in submitted)


def test_in_a_group_of_one_neither() -> None:
    context = _core.Context.make(0, 1, 1, 128 * MIB, 128 * MIB, TIMEOUT)
    rank = Rank(0, context, context.group(1, "alone", 0, [0], [0], 1))
    one = all_reduce(rank, False, 0)
    assert not one.operation.done()
    _finish([one.operation])
    assert one.untouched


def test_nor_does_the_submission_of_a_small_operation_run_a_large_one_before_it() -> None:
    ranks = _pair("shm")
    large = [all_reduce(rank, True, 0) for rank in ranks]
    small = []
    for rank in ranks:
        x = torch.ones(SMALL)
        small.append((rank.submit(OpKind.ALL_REDUCE, [x], [x], 1), x))
    assert all(one.untouched for one in large)
    _finish([operation for operation, _ in small])
    assert all(one.operation.done() and one.right for one in large)
    assert all(x.eq(2).all() for _, x in small)


def test_small_operations_end_where_they_are_submitted_last() -> None:
    ranks = _pair("shm")
    tensors = [torch.ones(SMALL) for _ in ranks]
    submitted = [rank.submit(OpKind.ALL_REDUCE, [x], [x], 0) for rank, x in zip(ranks, tensors, strict=True)]
    assert submitted[1].done()
    _finish(submitted)
    assert all(x.eq(2).all() for x in tensors)


def test_a_peer_may_work_with_what_a_large_operation_has_shown_it_at_submission() -> None:
    # The root of a broadcast does nothing after its submission until the others have the data.
    root, other = _pair("shm")
    x, y = root.tensor(LARGE, True).fill_(7), torch.zeros(LARGE)
    shown = root.submit(OpKind.BROADCAST, [x], [x], 0, root=0)
    fetching = other.submit(OpKind.BROADCAST, [], [y], 0, root=0)
    end = time.monotonic() + TIMEOUT
    while not y[-1].eq(7) and time.monotonic() < end:
        fetching.wait(0.0)
    assert y.eq(7).all()
    assert not shown.done()
    _finish([shown, fetching])
