"""The test double of NCCL: results, the rules for misuse, aborts and failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest
import torch

from shoal.backend.nccl.library import DTYPES, Reduction, Result
from shoal.errors import RemoteError
from shoal.group import ProcessGroup
from shoal.testing import RankPool
from shoal.testing.leaks import no_leaks
from tests.support import pretend_device
from tests.support.fake_nccl import INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, FakeNccl, FakeNcclError
from tests.support.fake_streams import FakeRuntime, FakeStream
from tests.support.waiting import PATIENCE, until

SUM, PRODUCT, MAX, MIN, AVG = Reduction


class Rank:
    """A rank with its own instance of NCCL, a stream and a communicator."""

    def __init__(self, runtime: FakeRuntime, size: int, unique_id: bytes, rank: int, nccl: FakeNccl) -> None:
        self.runtime, self.nccl, self.rank = runtime, nccl, rank
        self.stream = runtime.stream(pretend_device.DEVICE, f"stream of {rank}")
        self.comm = nccl.init(size, unique_id, rank)

    @property
    def state(self) -> int:
        return self.nccl.async_error(self.comm)

    def call(self, function: str, *args: torch.Tensor | int) -> None:
        """Launch a function with these tensors and op, root or peer."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        others = [x for x in args if not isinstance(x, torch.Tensor)]
        for x in tensors:
            self.runtime.record_stream(x, self.stream)
        getattr(self.nccl, function)(
            *(x.data_ptr() for x in tensors), min(x.numel() for x in tensors), DTYPES[tensors[0].dtype],
            *others, self.comm, self.runtime.handle(self.stream),
        )  # fmt: skip

    def all_reduce(self, x: torch.Tensor, op: int = SUM) -> torch.Tensor:
        result = torch.zeros_like(x)
        self.call("all_reduce", x, result, op)
        return result

    def done(self) -> bool:
        """Whether the communicator is ready and the stream has run its work."""
        return self.state != Result.IN_PROGRESS and self.stream.record().wait(0.01)

    def close(self) -> None:
        self.nccl.finalize(self.comm)
        until(lambda: self.state == Result.SUCCESS)
        self.nccl.destroy(self.comm)


class Ranks:
    """Makes ranks in this process.

    Attributes:
        expected_violations: their number at the end of the test.
    """

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.instances: list[FakeNccl] = []
        self.expected_violations = 0

    def nccl(self, **options: float) -> FakeNccl:
        self.instances.append(FakeNccl(self.runtime, **{"launch_s": 0.0, **options}))
        return self.instances[-1]

    def __call__(self, size: int, instances: Sequence[FakeNccl] = (), **options: float) -> list[Rank]:
        instances = instances or [self.nccl(**options) for _ in range(size)]
        unique_id = instances[0].unique_id()
        made = [Rank(self.runtime, size, unique_id, i, nccl) for i, nccl in enumerate(instances)]
        until(lambda: all(rank.state == Result.SUCCESS for rank in made))
        return made


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with no_leaks():
        ranks = Ranks()
        yield ranks
        for nccl in ranks.instances:
            nccl.close()
        assert ranks.runtime.broken() == []
        ranks.runtime.close()
    violations = [text for nccl in ranks.instances for text in nccl.violations]
    assert len(violations) == ranks.expected_violations, violations


def finish(made: Sequence[Rank]) -> None:
    until(lambda: all(rank.done() for rank in made))


def warmed(made: Sequence[Rank]) -> None:
    """Launch an all_reduce on all ranks, so that later ones are on the stream at once."""
    for rank in made:
        rank.all_reduce(torch.zeros(1))
    finish(made)


def refused(status: int, call: Callable[[], object]) -> None:
    with pytest.raises(FakeNcclError) as caught:
        call()
    assert caught.value.status == status


def test_collectives(ranks: Ranks) -> None:
    made = ranks(3)
    inputs = [torch.arange(6.0) + 10 * i for i in range(3)]
    results: dict[str, list[torch.Tensor]] = {}
    for function, length, *args in (
        ("all_reduce", 6, SUM), ("all_gather", 18), ("broadcast", 6, 1), ("reduce_scatter", 2, SUM),
        ("reduce", 6, MAX, 2),
    ):  # fmt: skip
        results[function] = [torch.zeros(length) for _ in made]
        for rank, result in zip(made, results[function], strict=True):
            rank.call(function, inputs[rank.rank], result, *args)
        finish(made)
    total = torch.stack(inputs).sum(0)
    for i in range(3):
        assert torch.equal(results["all_reduce"][i], total)
        assert torch.equal(results["all_gather"][i], torch.cat(inputs))
        assert torch.equal(results["broadcast"][i], inputs[1])
        assert torch.equal(results["reduce_scatter"][i], total[2 * i : 2 * i + 2])
        assert torch.equal(results["reduce"][i], inputs[2] if i == 2 else torch.zeros(6))


@pytest.mark.parametrize(
    ("dtype", "op", "inputs", "expected"),
    [
        # 2049 is no float16: after each addition the sum is rounded to 2048
        (torch.float16, SUM, [[2048.0], [1.0], [1.0]], [2048.0]),
        (torch.bfloat16, SUM, [[256.0], [1.0], [1.0]], [256.0]),
        (torch.float32, SUM, [[2048.0], [1.0], [1.0]], [2050.0]),
        (torch.float64, AVG, [[1.0], [2.0]], [1.5]),
        (torch.float16, MAX, [[float("nan"), 1.0], [2.0, float("nan")]], [2.0, 1.0]),
        (torch.float32, MIN, [[float("nan"), 1.0], [2.0, float("nan")]], [2.0, 1.0]),
        (torch.int8, SUM, [[100], [100]], [-56]),
        (torch.uint8, PRODUCT, [[100], [100]], [16]),
        (torch.int32, AVG, [[-4, 4], [-3, 3]], [-3, 3]),
        (torch.int8, AVG, [[100], [100]], [-28]),
        (torch.uint64, MAX, [[2**64 - 1], [1]], [2**64 - 1]),
        (torch.uint32, AVG, [[2**32 - 1], [0]], [2**31 - 1]),
        (torch.int64, MIN, [[-5], [3]], [-5]),
    ],
)
def test_reductions(
    ranks: Ranks, dtype: torch.dtype, op: int, inputs: list[list[float]], expected: list[float]
) -> None:
    made = ranks(len(inputs))
    given = [torch.tensor(x, dtype=dtype) for x in inputs]
    results = [rank.all_reduce(x, op) for rank, x in zip(made, given, strict=True)]
    finish(made)
    assert [result.tolist() for result in results] == [expected] * len(made)


def test_buffers_in_place(ranks: Ranks) -> None:
    made = ranks(2)
    gathered = [torch.zeros(4) for _ in made]
    scattered = [torch.arange(4.0) for _ in made]
    for i, rank in enumerate(made):
        gathered[i][2 * i : 2 * i + 2] = i + 1
        rank.call("all_gather", gathered[i][2 * i : 2 * i + 2], gathered[i])
    finish(made)
    for i, rank in enumerate(made):
        rank.call("reduce_scatter", scattered[i], scattered[i][2 * i : 2 * i + 2], SUM)
    finish(made)
    for rank, x in zip(made, scattered, strict=True):
        rank.call("all_reduce", x, x, MAX)
    finish(made)
    assert all(x.tolist() == [1.0, 1.0, 2.0, 2.0] for x in gathered)
    assert all(x.tolist() == [0.0, 2.0, 4.0, 6.0] for x in scattered)


def test_other_overlaps_are_refused(ranks: Ranks) -> None:
    rank = ranks(2)[1]
    x = torch.zeros(8)
    ranks.expected_violations = 5
    refused(INVALID_ARGUMENT, lambda: rank.call("all_reduce", x[:4], x[2:6], SUM))
    refused(INVALID_ARGUMENT, lambda: rank.call("all_gather", x[:4], x))
    refused(INVALID_ARGUMENT, lambda: rank.call("reduce_scatter", x, x[:4], SUM))
    refused(INVALID_ARGUMENT, lambda: rank.call("broadcast", x[:4], x[2:6], 1))
    rank.nccl.group_start()
    rank.call("send", x, 0)
    rank.call("recv", x, 0)
    refused(INVALID_USAGE, rank.nccl.group_end)


def test_messages_match_in_order(ranks: Ranks) -> None:
    made = ranks(3)  # one of which does not take part
    received = torch.zeros(2)
    made[1].nccl.group_start()
    for part in received.split(1):
        made[1].call("recv", part, 0)
    made[1].nccl.group_end()
    for value in (1.0, 2.0):
        made[0].call("send", torch.tensor([value]), 1)
        until(lambda: made[0].state == Result.SUCCESS)
    finish(made)
    assert received.tolist() == [1.0, 2.0]


def test_an_exchange_needs_a_group(ranks: Ranks) -> None:
    made = ranks(2)
    given, results = [torch.tensor([i + 1.0]) for i in range(2)], [torch.zeros(2) for _ in made]

    def exchange(rank: Rank) -> None:
        for peer, part in enumerate(results[rank.rank].split(1)):
            rank.call("send", given[rank.rank], peer)
            rank.call("recv", part, peer)

    for rank in made:
        rank.nccl.group_start()
        exchange(rank)
        rank.nccl.group_end()
    finish(made)
    assert [result.tolist() for result in results] == [[1.0, 2.0]] * 2
    for rank in made:
        rank.call("send", given[rank.rank], 1 - rank.rank)
        rank.call("recv", results[rank.rank][:1], 1 - rank.rank)
    assert not made[0].stream.record().wait(0.05)
    ranks.expected_violations = 1
    refused(INVALID_USAGE, lambda: made[0].call("send", given[0], 0))


def test_groups_of_collectives_and_of_communicators(ranks: Ranks) -> None:
    made = ranks(2)
    others = ranks(2, [rank.nccl for rank in made])
    results = []
    for i, (rank, other) in enumerate(zip(made, others, strict=True)):
        rank.nccl.group_start()
        results += [rank.all_reduce(torch.tensor([i + 1.0])), rank.all_reduce(torch.tensor([2.0]), PRODUCT)]
        results += [other.all_reduce(torch.tensor([i + 5.0]))]
        rank.nccl.group_end()
    finish(made + others)
    assert [x.item() for x in results] == [3.0, 4.0, 11.0] * 2
    ranks.expected_violations = 1
    made[0].nccl.group_start()
    made[0].all_reduce(torch.zeros(1))
    made[0].call("send", torch.zeros(1), 1)
    refused(INVALID_USAGE, made[0].nccl.group_end)


def test_empty_tensors(ranks: Ranks) -> None:
    made = ranks(2)
    for rank in made:
        rank.all_reduce(torch.zeros(0))
    finish(made)


def test_inputs_are_read_and_outputs_written_when_the_stream_runs_the_kernel(ranks: Ranks) -> None:
    made = ranks(2)
    warmed(made)
    made[0].stream.hold()
    x = torch.zeros(1)
    results = [made[0].all_reduce(x), made[1].all_reduce(torch.ones(1))]
    assert not made[1].stream.record().wait(0.05)
    x += 5
    assert [result.item() for result in results] == [0.0, 0.0]
    made[0].stream.release()
    finish(made)
    assert [result.item() for result in results] == [6.0, 6.0]


def test_kernels_on_two_streams_run_in_the_order_of_launches(ranks: Ranks) -> None:
    made = ranks(2)
    warmed(made)
    first = made[0].stream
    first.hold()
    results = [made[0].all_reduce(torch.ones(1))]
    made[0].stream = ranks.runtime.stream(pretend_device.DEVICE, "second")
    results.append(made[0].all_reduce(torch.ones(1)))
    for _ in range(2):
        made[1].all_reduce(torch.ones(1))
    assert not made[0].stream.record().wait(0.05)
    first.release()
    finish(made)
    assert [result.item() for result in results] == [2.0, 2.0]


@pytest.mark.parametrize("difference", ["function", "count", "dtype", "op", "root"])
def test_kernels_that_differ_never_complete_until_an_abort(ranks: Ranks, difference: str) -> None:
    made = ranks(2)
    warmed(made)
    for rank in made:
        rank.call("reduce", torch.zeros(1), torch.zeros(1), SUM, 0)
    finish(made)
    result = torch.full((2,), 7.0)
    made[0].call("reduce", torch.zeros(2), result, SUM, 0)
    if difference == "function":
        made[1].all_reduce(torch.zeros(2))
    else:
        made[1].call(
            "reduce",
            torch.zeros(
                3 if difference == "count" else 2, dtype=torch.int32 if difference == "dtype" else None
            ),
            torch.zeros(3),
            MAX if difference == "op" else SUM,
            1 if difference == "root" else 0,
        )
    assert not any(rank.stream.record().wait(0.05) for rank in made)
    assert [rank.state for rank in made] == [Result.SUCCESS] * 2
    for rank in made:
        rank.nccl.abort(rank.comm)
        assert rank.stream.record().wait(PATIENCE)
    assert result.tolist() == [7.0, 7.0]


def test_every_launch_takes_a_moment(ranks: Ranks) -> None:
    made = ranks(2, launch_s=0.05)
    warmed(made)
    results = [rank.all_reduce(torch.ones(1)) for rank in made]
    assert [rank.state for rank in made] == [Result.IN_PROGRESS] * 2
    finish(made)
    assert [result.item() for result in results] == [2.0, 2.0]


def test_nothing_may_be_put_on_the_stream_of_a_launch_in_progress(ranks: Ranks) -> None:
    made = ranks(2)
    made[0].all_reduce(torch.ones(1))
    ranks.expected_violations = 1
    made[0].stream.enqueue(lambda: None)
    assert "while its launch is IN_PROGRESS" in made[0].nccl.violations[0]
    made[1].all_reduce(torch.ones(1))
    finish(made)
    made[0].stream.enqueue(lambda: None)


def test_the_first_launch_of_a_function_is_in_progress_until_all_ranks_have_launched_it(ranks: Ranks) -> None:
    made = ranks(2)
    results = [made[0].all_reduce(torch.ones(1))]
    time.sleep(0.05)
    assert made[0].stream.record().wait(PATIENCE)  # the kernel is not on the stream
    assert made[0].state == Result.IN_PROGRESS
    ranks.expected_violations = 3
    refused(INVALID_ARGUMENT, lambda: made[0].all_reduce(torch.ones(1)))
    refused(INVALID_ARGUMENT, lambda: made[0].nccl.finalize(made[0].comm))
    refused(INVALID_USAGE, lambda: made[0].nccl.destroy(made[0].comm))
    assert "before its finalize" in made[0].nccl.last_error(made[0].comm)
    results.append(made[1].all_reduce(torch.ones(1)))
    finish(made)
    assert [result.item() for result in results] == [2.0, 2.0]
    made[0].all_reduce(torch.ones(1))
    assert made[0].state == Result.SUCCESS
    made[0].nccl.abort(made[0].comm)


def test_init_is_in_progress_until_all_ranks_have_connected(ranks: Ranks) -> None:
    nccl = ranks.nccl()
    unique_id = nccl.unique_id()
    # another size, and the same rank twice
    comms = [nccl.init(size, unique_id, rank) for size, rank in ((3, 1), (2, 0), (2, 0))]
    time.sleep(0.3)
    assert [nccl.async_error(comm) for comm in comms] == [Result.IN_PROGRESS] * 3
    ranks.expected_violations = 4
    refused(INVALID_ARGUMENT, lambda: nccl.finalize(comms[0]))
    refused(INVALID_ARGUMENT, lambda: nccl.init(2, unique_id, 2))
    refused(INVALID_ARGUMENT, lambda: nccl.init(0, unique_id, 0))
    refused(INVALID_ARGUMENT, lambda: nccl.init(2, unique_id[1:], 0))
    for comm in comms:
        nccl.abort(comm)


def test_calls_of_two_threads_at_once_are_refused(ranks: Ranks) -> None:
    first, second = (ranks(1, [nccl])[0] for nccl in [ranks.nccl()] * 2)
    first.nccl.group_start()
    errors: list[Exception] = []

    def in_thread(call: Callable[[], object]) -> None:
        def run() -> None:
            try:
                call()
            except FakeNcclError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    in_thread(lambda: second.all_reduce(torch.zeros(1)))
    in_thread(second.nccl.group_start)
    in_thread(second.nccl.group_end)
    first.nccl.group_end()
    in_thread(lambda: second.all_reduce(torch.zeros(1)))
    assert [str(error) for error in errors] == ["InvalidUsage (5): invalid usage"] * 3
    ranks.expected_violations = 3


def test_a_single_call_excludes_calls_of_other_threads(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = ranks(1)[0]
    inside, leave = threading.Event(), threading.Event()
    stream_of = ranks.runtime.stream_of

    def slow_stream_of(handle: int) -> FakeStream:
        inside.set()
        assert leave.wait(PATIENCE)
        return stream_of(handle)

    monkeypatch.setattr(ranks.runtime, "stream_of", slow_stream_of)
    thread = threading.Thread(target=rank.all_reduce, args=(torch.zeros(1),))
    thread.start()
    assert inside.wait(PATIENCE)
    ranks.expected_violations = 1
    refused(INVALID_USAGE, lambda: rank.all_reduce(torch.zeros(1)))
    leave.set()
    thread.join()


def test_calls_in_the_wrong_state_or_with_wrong_arguments_are_refused(ranks: Ranks) -> None:
    rank, other = ranks(2)
    nccl, x = rank.nccl, torch.zeros(2)
    stream = ranks.runtime.handle(rank.stream)

    def call(
        count: int = 2, dtype: int = 7, op: int = SUM, address: int = x.data_ptr()
    ) -> Callable[[], None]:
        return lambda: nccl.all_reduce(address, address, count, dtype, op, rank.comm, stream)

    wrong = [
        call(count=-1), call(dtype=12), call(dtype=10), call(op=5), call(address=0),
        lambda: rank.call("broadcast", x, x, 2),
        lambda: rank.call("send", x, -1),
        lambda: nccl.all_reduce(x.data_ptr(), x.data_ptr(), 2, 7, SUM, rank.comm, 12345),
    ]  # fmt: skip
    for each in wrong:
        refused(INVALID_ARGUMENT, each)
    nccl.group_start()
    refused(INVALID_ARGUMENT, call(count=-1))
    rank.all_reduce(x)
    refused(INVALID_ARGUMENT, nccl.group_end)  # nothing was launched
    assert rank.state == Result.SUCCESS
    refused(INVALID_USAGE, nccl.group_end)
    refused(INVALID_USAGE, lambda: nccl.destroy(rank.comm))
    rank.nccl.finalize(rank.comm)
    until(lambda: rank.state == Result.SUCCESS)
    refused(INVALID_USAGE, call())
    nccl.destroy(rank.comm)
    other.nccl.abort(other.comm)
    for function in (nccl.async_error, nccl.last_error, nccl.finalize, nccl.destroy, nccl.abort):
        refused(INVALID_ARGUMENT, lambda function=function: function(rank.comm))
    refused(INVALID_ARGUMENT, call())
    refused(INVALID_ARGUMENT, lambda: other.nccl.abort(other.comm))
    ranks.expected_violations = len(wrong) + 1 + 3 + 6 + 1


def test_8_bit_floats_are_carried_but_not_reduced(ranks: Ranks) -> None:
    made = ranks(2)
    results = [torch.zeros(4, dtype=torch.uint8) for _ in made]
    for rank, result in zip(made, results, strict=True):
        x = torch.tensor([rank.rank, 3], dtype=torch.uint8)
        ranks.runtime.record_stream(x, rank.stream)
        stream = ranks.runtime.handle(rank.stream)
        rank.nccl.all_gather(x.data_ptr(), result.data_ptr(), 2, 11, rank.comm, stream)
    finish(made)
    assert [result.tolist() for result in results] == [[0, 3, 1, 3]] * 2


def test_an_abort_ends_running_and_queued_kernels_of_its_rank_only(ranks: Ranks) -> None:
    made = ranks(3)
    warmed(made)
    results = [made[0].all_reduce(torch.ones(1)) for _ in range(3)] + [made[1].all_reduce(torch.ones(1))]
    assert not made[0].stream.record().wait(0.05)
    made[0].nccl.abort(made[0].comm)
    assert made[0].stream.record().wait(PATIENCE)
    for rank in made[1:]:
        until(lambda rank=rank: rank.state == REMOTE_ERROR)
    assert not made[1].stream.record().wait(0.05)
    refused(REMOTE_ERROR, lambda: made[1].all_reduce(torch.ones(1)))
    made[1].nccl.abort(made[1].comm)
    assert made[1].stream.record().wait(PATIENCE)
    assert [x.item() for x in results] == [0.0] * 4


def test_an_abort_while_in_progress(ranks: Ranks) -> None:
    made = ranks(2)
    result = made[0].all_reduce(torch.ones(1))
    assert made[0].state == Result.IN_PROGRESS
    made[0].nccl.abort(made[0].comm)
    assert made[0].stream.record().wait(PATIENCE)
    until(lambda: made[1].state == REMOTE_ERROR)
    assert result.item() == 0.0


def test_a_rank_that_finalizes_does_not_disturb_the_others(ranks: Ranks) -> None:
    made = ranks(3)
    warmed(made)
    made[1].stream.hold()
    results = [rank.all_reduce(torch.ones(1)) for rank in made]
    made[0].nccl.finalize(made[0].comm)
    time.sleep(0.05)
    assert made[0].state == Result.IN_PROGRESS  # its kernel waits for that of rank 1
    made[1].stream.release()
    until(lambda: made[0].state == Result.SUCCESS)
    made[0].nccl.destroy(made[0].comm)
    received = torch.zeros(1)
    made[1].call("send", torch.ones(1), 2)
    made[2].call("recv", received, 1)
    finish(made[1:])
    assert [x.item() for x in (*results, received)] == [3.0, 3.0, 3.0, 1.0]
    for rank in made[1:]:
        rank.close()


def test_replays_launch_the_kernels_of_a_graph(ranks: Ranks) -> None:
    made = ranks(2)
    warmed(made)
    xs, results, graphs = [torch.zeros(1) for _ in made], [], []
    for rank, x in zip(made, xs, strict=True):
        with ranks.runtime.use(rank.stream), ranks.runtime.capture(pretend_device.DEVICE) as graph:
            captured = Rank.__new__(Rank)
            captured.__dict__ |= {**vars(rank), "stream": ranks.runtime.current_stream(pretend_device.DEVICE)}
            results.append(captured.all_reduce(x))
            until(lambda rank=rank: rank.state == Result.SUCCESS)
        graphs.append(graph)
    assert [result.item() for result in results] == [0.0, 0.0]
    for i in range(3):
        between = []
        for rank, x, graph in zip(made, xs, graphs, strict=True):
            x.fill_(i + rank.rank)
            graph.replay(rank.stream)
            between.append(rank.all_reduce(torch.ones(1)))
        finish(made)
        assert [result.item() for result in (*results, *between)] == [2.0 * i + 1] * 2 + [2.0] * 2
    for rank in made:
        rank.nccl.finalize(rank.comm)
    time.sleep(0.05)
    assert [rank.state for rank in made] == [Result.IN_PROGRESS] * 2
    ranks.expected_violations = 1
    graphs[0].replay(made[0].stream)
    del graph
    graphs.clear()
    until(lambda: made[1].state == Result.SUCCESS)
    made[1].nccl.destroy(made[1].comm)
    made[0].nccl.abort(made[0].comm)


def test_failures_that_a_test_asks_for(ranks: Ranks) -> None:
    rank = ranks(1)[0]
    nccl = rank.nccl
    nccl.fail(rank.comm, 3)
    assert rank.state == 3
    refused(3, lambda: rank.all_reduce(torch.zeros(1)))
    nccl.abort(rank.comm)
    nccl.init_failure = INVALID_ARGUMENT
    refused(INVALID_ARGUMENT, lambda: nccl.init(1, nccl.unique_id(), 0))
    for failure in (2, INVALID_USAGE):
        nccl.init_failure = failure
        assert nccl.async_error(nccl.init(1, nccl.unique_id(), 0)) == failure
    nccl.version_code = 22100
    assert nccl.version() == 22100
    assert nccl.error_string(6) == "remote process exited or there was a network error"


def test_a_unique_id_without_a_hub_is_a_remote_error(ranks: Ranks) -> None:
    nccl = ranks.nccl()
    unique_id = nccl.unique_id()
    nccl.close()
    comm = nccl.init(2, unique_id, 0)
    until(lambda: nccl.async_error(comm) == REMOTE_ERROR)


def test_threads_with_random_delays(ranks: Ranks) -> None:
    """Three ranks launch collectives and messages on two communicators."""
    made = ranks(3)
    others = ranks(3, [rank.nccl for rank in made])
    plan = Random(0).choices(range(3), k=60)
    results: list[list[torch.Tensor]] = [[] for _ in made]

    def train(rank: Rank, other: Rank, delays: Random) -> None:
        for step, action in enumerate(plan):
            x = torch.full((8,), float(rank.rank + step))
            if action < 2:
                used = (rank, other)[action]
                results[rank.rank].append(used.all_reduce(x))
            else:
                used, received = rank, torch.zeros(8)
                rank.nccl.group_start()
                rank.call("send", x, (rank.rank + 1) % 3)
                rank.call("recv", received, (rank.rank - 1) % 3)
                rank.nccl.group_end()
                results[rank.rank].append(received)
            until(lambda used=used: used.state == Result.SUCCESS)
            time.sleep(delays.choice([0.0, 0.0, 0.003]))

    threads = [
        threading.Thread(target=train, args=(rank, other, Random(rank.rank)))
        for rank, other in zip(made, others, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finish(made + others)
    for i, found in enumerate(results):
        expected = [3.0 + 3 * n if action < 2 else float((i - 1) % 3 + n) for n, action in enumerate(plan)]
        assert [x[0].item() for x in found] == expected
    for rank in made + others:
        rank.close()


# -- ranks as processes ----------------------------------------------------------------------------------


def _with_a_killed_rank(group: ProcessGroup, killed: int) -> None:
    runtime = pretend_device.make()
    nccl = FakeNccl(runtime)
    unique_id = group.broadcast_object(nccl.unique_id() if group.rank == 0 else None).wait()
    rank = Rank(runtime, group.size, unique_id, group.rank, nccl)
    until(lambda: rank.state == Result.SUCCESS)
    with runtime.use(rank.stream):
        result = rank.all_reduce(torch.full((2,), float(group.rank), device="pretend") + 1)
        until(lambda: rank.state == Result.SUCCESS)
        assert (result * 2).tolist() == [6.0, 6.0]
    if group.rank != killed:
        rank.all_reduce(torch.zeros(1))
    group.barrier().wait()
    if group.rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: rank.state == REMOTE_ERROR)
    assert not rank.stream.record().wait(0.05)
    nccl.abort(rank.comm)
    assert rank.stream.record().wait(PATIENCE)
    raise KeyError("as expected")  # only errors have the results of single ranks


@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_processes_is_killed(killed: int) -> None:
    with RankPool(2) as pool, pytest.raises(RemoteError, match="as expected"):
        pool.run(_with_a_killed_rank, killed)
