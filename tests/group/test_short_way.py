"""The short way of the commonest calls gives what the long way gives, and leaves to it what it cannot do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pytest
import torch

from shoal.errors import GroupAborted, GroupClosed, GroupError, UnsupportedOperation, UsageError
from shoal.future import Future
from shoal.group import ProcessGroup
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

SIZE = 3

#: Makes a tensor of the given values.
Make: TypeAlias = Callable[[list[float]], torch.Tensor]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lazily_negated_tensors_are_reduced_as_they_read(worlds: Worlds, topology: str) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.full((4,), complex(0, group.rank + 1)).conj().imag
        assert x.is_neg()
        group.all_reduce(x).wait()
        assert x.tolist() == [-6.0] * 4

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_overlapping_buffers_are_gathered_as_if_they_were_apart(worlds: Worlds, topology: str) -> None:
    def collective(group: ProcessGroup) -> None:
        out = torch.zeros(SIZE * 4)
        mine = out[group.rank * 4 : group.rank * 4 + 4]
        mine.fill_(float(group.rank))
        group.all_gather_single(out, mine).wait()
        assert out.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@pytest.mark.parametrize("registered", [True, False])
def test_all_to_all_in_place_sends_what_was_there_before(worlds: Worlds, registered: bool) -> None:
    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()
        part = 50_000
        own = torch.arange(part * SIZE, dtype=torch.float32)
        for i in range(20):
            x = group.empty(part * SIZE) if registered else torch.empty(part * SIZE)
            x.copy_(own + (group.rank + i))
            group.all_to_all_single(x, x).wait()
            begin = group.rank * part
            expected = [own[begin : begin + part] + (rank + i) for rank in range(SIZE)]
            assert torch.equal(x, torch.cat(expected))

    worlds(SIZE).run(collective)


#: Collectives of lists, and of a root: called with the group, a function that makes a tensor of given values,
#: and the root; each returns the value of its future.
LISTS: dict[str, Callable[[ProcessGroup, Make, int], Any]] = {
    "reduce": lambda group, make, root: group.reduce(make([1, group.rank]), root).wait(),
    "reduce max": lambda group, make, root: group.reduce(make([group.rank, 1]), root, "max").wait(),
    "all_gather": lambda group, make, _: group.all_gather(
        [make([0, 0]) for _ in range(SIZE)], make([group.rank, 1])
    ).wait(),
    "all_gather alone": lambda group, make, _: group.all_gather(make([group.rank, 1])).wait(),
    "reduce_scatter": lambda group, make, _: group.reduce_scatter(
        make([0, 0]), [make([rank, group.rank]) for rank in range(SIZE)]
    ).wait(),
    "gather": lambda group, make, root: group.gather(
        make([group.rank, 1]), [make([0, 0]) for _ in range(SIZE)] if group.rank == root else None, root
    ).wait(),
    "gather alone": lambda group, make, root: group.gather(make([group.rank, 1]), root=root).wait(),
    "scatter": lambda group, make, root: group.scatter(
        make([0, 0]), [make([rank, 7]) for rank in range(SIZE)] if group.rank == root else None, root
    ).wait(),
    "all_to_all": lambda group, make, _: group.all_to_all(
        [make([0, 0]) for _ in range(SIZE)], tuple(make([group.rank, rank]) for rank in range(SIZE))
    ).wait(),
}
_SUMS = [float(SIZE), float(sum(range(SIZE)))]
EXPECTED: dict[str, Callable[[int, int], Any]] = {
    "reduce": lambda rank, root: _SUMS if rank == root else None,
    "reduce max": lambda rank, root: [SIZE - 1.0, 1.0] if rank == root else None,
    "all_gather": lambda rank, root: [[float(each), 1.0] for each in range(SIZE)],
    "all_gather alone": lambda rank, root: [[float(each), 1.0] for each in range(SIZE)],
    "reduce_scatter": lambda rank, root: [float(SIZE * rank), _SUMS[1]],
    "gather": lambda rank, root: [[float(each), 1.0] for each in range(SIZE)] if rank == root else None,
    "gather alone": lambda rank, root: [[float(each), 1.0] for each in range(SIZE)] if rank == root else None,
    "scatter": lambda rank, root: [float(rank), 7.0],
    "all_to_all": lambda rank, root: [[float(each), float(rank)] for each in range(SIZE)],
}


def plain(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def strided(values: list[float]) -> torch.Tensor:
    """Return a tensor that only the long way takes."""
    return plain([each for value in values for each in (value, -1.0)])[::2]


def listed(value: torch.Tensor | list[torch.Tensor] | None) -> Any:
    if isinstance(value, list):
        return [x.tolist() for x in value]
    return None if value is None else value.tolist()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", LISTS)
def test_collectives_of_lists_and_of_roots_go_either_way(worlds: Worlds, name: str, topology: str) -> None:
    """On every rank the short way, then on one rank the long one, then on all."""

    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()
        for root in range(SIZE):
            for long in ((), (1,), range(SIZE)):
                make = strided if group.rank in long else plain
                assert listed(LISTS[name](group, make, root)) == EXPECTED[name](group.rank, root)
        assert group.recorder is not None
        short, other = (group.recorder.entries()[i] for i in (-3, -1))
        for field in ("kind", "dtype", "count", "root", "peer", "tag", "state", "failure"):
            assert getattr(short, field) == getattr(other, field)

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@pytest.mark.parametrize("name", LISTS)
def test_collectives_of_lists_and_of_roots_take_the_short_way(
    worlds: Worlds, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()
        monkeypatch.setattr(group._submitter, "submit", None)
        assert listed(LISTS[name](group, plain, 1)) == EXPECTED[name](group.rank, 1)

    worlds(SIZE).run(collective)


def test_lists_may_be_changed_once_the_call_has_returned(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()
        out, inputs = [torch.zeros(1) for _ in range(SIZE)], [torch.ones(1) for _ in range(SIZE)]
        future = group.all_to_all(out, inputs)
        first = out[0]
        out.clear()
        inputs.clear()
        assert future.wait()[0] is first
        assert listed(future.wait()) == [[1.0]] * SIZE

    worlds(SIZE).run(collective)


def test_wrong_lists_are_refused_as_ever(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()
        x, xs = torch.ones(2), [torch.ones(2) for _ in range(SIZE)]
        root = group.rank
        for wrong in (
            lambda: group.all_gather([x] * SIZE, torch.ones(2)),
            lambda: group.all_gather(xs[1:], x),
            lambda: group.all_gather(xs, torch.ones(3)),
            lambda: group.all_gather(xs, torch.ones(2, dtype=torch.int32)),
            lambda: group.reduce_scatter(x, xs[1:]),
            lambda: group.reduce_scatter(torch.ones(3), xs),
            lambda: group.reduce_scatter(x, x),  # type: ignore[arg-type]
            lambda: group.gather(x, [x] * SIZE, root),
            lambda: group.gather(x, xs, (root + 1) % SIZE),
            lambda: group.scatter(x, None, root),
            lambda: group.scatter(x, xs, (root + 1) % SIZE),
            lambda: group.scatter(torch.ones(3), xs, root),
            lambda: group.all_to_all(xs, xs[:1] * 2),
            lambda: group.all_to_all([x] * SIZE, xs),
            lambda: group.reduce([1.0]),  # type: ignore[arg-type]
            lambda: group.reduce(x, SIZE),
        ):
            with pytest.raises(UsageError):
                wrong()
        assert group.all_reduce(x).wait().tolist() == [SIZE] * 2

    worlds(SIZE).run(collective)


@pytest.mark.parametrize("registered", [True, False])
def test_inputs_may_share_memory_with_outputs(worlds: Worlds, registered: bool) -> None:
    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()
        for _ in range(10):
            memory = group.empty(SIZE * 50_000) if registered else torch.empty(SIZE * 50_000)
            parts = list(memory.chunk(SIZE))
            for rank, part in enumerate(parts):
                part.fill_(float(10 * group.rank + rank))
            group.all_to_all(parts, parts).wait()
            assert [part.unique().tolist() for part in parts] == [
                [10.0 * i + group.rank] for i in range(SIZE)
            ]
            group.all_gather(parts, parts[1]).wait()
            assert [part.unique().tolist() for part in parts] == [[10.0 + i] for i in range(SIZE)]

    worlds(SIZE).run(collective)


def test_wrong_arguments_are_refused_as_ever_and_leave_the_group_usable(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.ones(6)
        for wrong in (
            lambda: group.broadcast(x, SIZE),
            lambda: group.broadcast(x, -1),
            lambda: group.broadcast(x, True),
            lambda: group.all_gather_single(torch.ones(6), x),
            lambda: group.all_gather_single(torch.ones(18, dtype=torch.int32), x),
            lambda: group.reduce_scatter_single(torch.ones(6), x),
            lambda: group.all_to_all_single(torch.ones(2, 3), x),
            lambda: group.all_to_all_single(torch.ones(4), torch.ones(4)),
            lambda: group.all_reduce([1.0]),  # type: ignore[arg-type]
            lambda: group.all_reduce(x.to_sparse()),
            lambda: group.all_reduce(x, timeout=-1),
        ):
            with pytest.raises(UsageError):
                wrong()
        assert group.all_reduce(x).wait().tolist() == [SIZE] * 6

    worlds(SIZE).run(collective)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("registered", [(0, 1, 2), (0,), (1,), ()])
@pytest.mark.parametrize("count", [2**18 + 3, 2**18 - 64])
def test_large_broadcasts_arrive_whole_whoever_registered(
    worlds: Worlds, size: int, registered: tuple[int, ...], count: int
) -> None:
    def collective(group: ProcessGroup) -> None:
        for root in range(group.size):
            x = group.empty(count + 1)[1:] if group.rank in registered else torch.empty(count)
            x.fill_(-1.0)
            if group.rank == root:
                x.copy_(torch.arange(count) + root)
            group.broadcast(x, root).wait()
            assert torch.equal(x, torch.arange(count, dtype=torch.float32) + root)
            group.barrier().wait()

    worlds(size).run(collective)


@pytest.mark.concurrency
def test_threads_that_wait_for_one_future_all_see_its_value(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        for _ in range(200):
            x = torch.ones(3)
            future = group.all_reduce(x)
            follower = future.then(lambda done: done.value().sum().item())
            seen: list[torch.Tensor] = []
            threads = [threading.Thread(target=lambda f=future, s=seen: s.append(f.wait())) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(y is x for y in seen)
            assert len(seen) == 3
            assert follower.wait() == 3.0 * group.size

    worlds(2).run(collective)


def test_the_futures_and_records_of_both_ways_are_alike(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        group.barrier().wait()  # the first call goes the long way
        x = torch.ones(4)
        short = group.all_reduce(x, timeout=50)
        long = group.all_reduce(torch.ones(8)[::2], timeout=50)
        assert isinstance(short, Future)
        assert re.match(r"<shoal.Future of all_reduce #\d+ 0x", repr(short))
        assert short.wait() is x
        assert short.result(1.0) is short.value() is x
        assert short.exception() is None
        assert short.wait(blocking=False) is x
        with pytest.raises(TypeError):
            short.wait(patience=3)  # type: ignore[call-arg]
        long.wait()
        assert short.key != long.key
        assert group.recorder is not None
        one, other = group.recorder.entries()[-2:]
        for field in ("kind", "dtype", "count", "root", "peer", "tag", "state", "failure"):
            assert getattr(one, field) == getattr(other, field)
        assert other.number == one.number + 1
        assert one.submitted <= one.ended

    worlds(SIZE).run(collective)


def pass_around(group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Send ``x`` to the next rank, and return the tensor of the previous one."""
    received = group.recv(torch.empty(x.shape, dtype=x.dtype), (group.rank - 1) % group.size)
    group.send(x, (group.rank + 1) % group.size).wait()
    return received.wait()


@pytest.mark.parametrize("scope", ["all", "pair"])
def test_messages_go_the_short_way(
    worlds: Worlds, scope: Literal["all", "pair"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(world: ProcessGroup) -> None:
        group = world.subgroup(range(SIZE), scope=scope)
        pass_around(group, torch.ones(1))  # the first receive goes the long way
        world.barrier().wait()
        with monkeypatch.context() as patch:
            patch.setattr(group._submitter, "submit_messages", None)
            for x in (torch.arange(4.0), torch.zeros(0), torch.tensor(3), torch.ones(2, 50_000)):
                assert torch.equal(pass_around(group, x), x)
            x = torch.empty(2)
            if group.rank == 0:
                wildcards = [group.recv(x.clone(), tag=2**30 - 1) for _ in range(SIZE - 1)]
                assert sum(future.wait().sum().item() for future in wildcards) == 6.0
            else:
                group.send(torch.full((2,), float(group.rank)), 0, tag=2**30 - 1).wait()
        if scope == "pair":
            with pytest.raises(UnsupportedOperation):
                group.all_reduce(torch.ones(1))
        world.barrier().wait()
        group.close()

    worlds(SIZE).run(exchange)


def test_the_futures_and_records_of_both_ways_of_a_message_are_alike(worlds: Worlds) -> None:
    def exchange(group: ProcessGroup) -> None:
        pass_around(group, torch.ones(2))
        assert group.recorder is not None
        to, source = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        for x in (torch.ones(4), torch.ones(8)[::2]):
            y = torch.zeros_like(x)
            received = group.recv(y, source, 7, timeout=50)
            sent = group.send(x, to, 7, timeout=50)
            assert repr(sent).startswith("<shoal.Future of send")
            assert sent.wait() is None
            assert received.wait() is y
            assert sent.key is received.key is None
        records = group.recorder.entries()[-4:]
        for one, other in ((0, 2), (1, 3)):
            for field in ("kind", "number", "dtype", "count", "root", "peer", "tag", "state", "failure"):
                assert getattr(records[one], field) == getattr(records[other], field)

    worlds(SIZE).run(exchange)


def test_a_message_that_does_not_fit_fails_in_the_short_way_as_ever(worlds: Worlds) -> None:
    def exchange(world: ProcessGroup) -> None:
        group = world.subgroup(range(SIZE), scope="pair")
        pass_around(group, torch.ones(1))
        if group.rank == 0:
            group.send(torch.ones(3), 1).wait()
            group.send(torch.ones(2, dtype=torch.int32), 1).wait()
        elif group.rank == 1:
            for _ in range(2):
                with pytest.raises(GroupError, match=r"send\(float32\[3\]\)|send\(int32\[2\]\)"):
                    group.recv(torch.empty(2), 0).wait()
        world.barrier().wait()
        group.close()

    worlds(SIZE).run(exchange)


def test_wrong_arguments_of_messages_are_refused_as_ever(worlds: Worlds) -> None:
    def exchange(group: ProcessGroup) -> None:
        pass_around(group, torch.ones(1))
        x, other = torch.ones(2), (group.rank + 1) % SIZE
        for wrong in (
            lambda: group.send(x, group.rank),
            lambda: group.send(x, SIZE),
            lambda: group.send(x, -1),
            lambda: group.send(x, 2**80),
            lambda: group.send(x, True),
            lambda: group.send(x, other, -1),
            lambda: group.send(x, other, 2**30),
            lambda: group.send(x, other, -(2**80)),
            lambda: group.send(x, other, timeout=0),
            lambda: group.send(x.to_sparse(), other),
            lambda: group.send([1.0], other),  # type: ignore[arg-type]
            lambda: group.recv(x, -2),
            lambda: group.recv(x.expand(3, 2), other),
            lambda: group.recv(x, other, timeout=float("nan")),
        ):
            with pytest.raises(UsageError):
                wrong()
        assert torch.equal(pass_around(group, x), x)

    worlds(SIZE).run(exchange)


def test_a_future_of_the_short_way_tells_whoever_subscribed_before_it_is_waited_for(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> list[float]:
        group.barrier().wait()
        if group.rank == 0:
            future = group.all_reduce(torch.ones(1))  # the others come later
            told = future.then(lambda done: done.value().item())
            group.barrier().wait()
        else:
            future = group.all_reduce(torch.ones(1))
            group.barrier().wait()
            told = future.then(lambda done: done.value().item())
        return [future.wait().item(), told.wait(50)]

    assert worlds(SIZE).run(collective) == [[3.0, 3.0]] * SIZE


def test_calls_in_callbacks_are_matched_by_key_beside_calls_of_the_short_way(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> list[float]:
        group.barrier().wait()
        again = group.all_reduce(torch.ones(1)).then(lambda done: group.all_reduce(done.value()).wait())
        outer = [group.all_reduce(torch.ones(1)).wait().item() for _ in range(20)]
        return [again.wait(50).item(), *outer]

    assert worlds(SIZE).run(collective) == [[9.0, *[3.0] * 20]] * SIZE


def test_what_is_aborted_or_closed_takes_no_calls(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        parts = [group.subgroup(range(SIZE), name) for name in ("aborted", "closed")]
        for part in parts:
            for _ in range(2):
                part.all_reduce(torch.ones(1)).wait()
        group.barrier().wait()
        if group.rank == 0:
            parts[0].abort("enough")
        else:
            with pytest.raises(GroupAborted):
                parts[0].all_reduce(torch.ones(1)).wait()
        parts[1].close()
        for part, error in zip(parts, (GroupAborted, GroupClosed), strict=True):
            with pytest.raises(error):
                part.all_reduce(torch.ones(1))
        parts[0].close()

    worlds(SIZE).run(collective)


@pytest.mark.concurrency
def test_threads_that_submit_large_and_small_tensors_get_a_number_each(worlds: Worlds) -> None:
    """Large ones are submitted without the GIL: no other thread may be given a number meanwhile."""

    def alone(group: ProcessGroup) -> None:
        group.barrier().wait()
        first = group._shortcut.number

        def submit(count: int) -> None:
            for _ in range(200):
                group.all_reduce(torch.ones(count)).wait()

        threads = [threading.Thread(target=submit, args=(count,)) for count in (2, 2, 20_000, 20_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert group.recorder is not None
        numbers = [entry.number for entry in group.recorder.entries()[-800:]]
        assert sorted(numbers) == list(range(first, first + 800))
        assert group._shortcut.number == first + 800

    worlds(1).run(alone)
