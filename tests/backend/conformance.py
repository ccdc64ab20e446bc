"""What every data channel must do: inherit :class:`BackendConformance` and name the backend.

    class TestPigeons(BackendConformance):
        backend = "carrier-pigeon"

The tests go through :class:`~shoal.group.ProcessGroup`, as users do, with ranks as threads.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from shoal.errors import (
    CollectiveMismatch,
    GroupAborted,
    GroupClosed,
    GroupError,
    OperationTimeout,
    WaitTimeout,
)
from shoal.future import Future, wait_all
from shoal.group import ProcessGroup
from shoal.testing import run_threads
from tests.support.waiting import until

from ..group.cases import all_cases, check_cases, run_cases
from ..group.reference import data, identical

#: Seconds: long enough for a loaded machine, short enough not to hold up a failing run.
PATIENCE = 30.0


def raises_here(kind: type[BaseException] | tuple[type[BaseException], ...], fn: Callable[[], Any]) -> Any:
    """The exception of ``kind`` that ``fn`` raises."""
    with pytest.raises(kind) as caught:
        fn()
    return caught.value


class BackendConformance:
    """The contract of ``backend/base.py`` as tests."""

    backend: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        """``fn(group, *args)`` on ``size`` ranks; a dictionary as result of each keeps comparisons simple."""
        defaults = {"backend": self.backend, "timeout": 2 * PATIENCE, "op_timeout": PATIENCE}
        return run_threads(fn, size, *args, **{**defaults, **self.options, **options})

    # -- results -------------------------------------------------------------------------------

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        cases = all_cases(37)
        assert (sum(case.legal for case in cases), sum(not case.legal for case in cases)) == (572, 308)
        check_cases(cases, self.run(run_cases, size, cases))

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_empty_tensors_go_through_every_collective(self) -> None:
        cases = [case for case in all_cases(0) if case.legal]
        check_cases(cases, self.run(run_cases, 3, cases))

    def test_results_are_the_same_bits_from_run_to_run(self) -> None:
        def sums(group: ProcessGroup) -> list[torch.Tensor]:
            xs = [data(torch.float32, count, group.rank).clone() for count in (7, 5000, 200_000)]
            return wait_all([group.all_reduce(x) for x in xs])

        first, second = self.run(sums, 3), self.run(sums, 3)
        for rank in range(3):
            for x, y, z in zip(first[0], first[rank], second[rank], strict=True):
                assert identical(x, y)
                assert identical(x, z)

    def test_what_is_longer_than_any_buffer_arrives_whole(self) -> None:
        count = 3_000_001

        def largest(group: ProcessGroup) -> bool:
            x, y = torch.full((count,), float(group.rank + 1)), torch.empty(count)
            wait_all([group.send(x, 1 - group.rank), group.recv(y, 1 - group.rank)])
            group.all_reduce(x).wait()
            return bool((x == 3.0).all()) and bool((y == 2.0 - group.rank).all())

        assert all(self.run(largest, 2))

    def test_many_operations_in_flight_complete_in_any_order_of_waiting(self) -> None:
        def shuffled(group: ProcessGroup) -> None:
            xs = [torch.full((i % 50 + 1,), float(i)) for i in range(200)]
            futures = list(enumerate([group.all_reduce(x) for x in xs]))
            random.Random(group.rank).shuffle(futures)
            for i, future in futures:
                assert future.wait().eq(float(i * group.size)).all()

        self.run(shuffled, 3)

    def test_a_tensor_is_let_go_once_it_was_waited_for(self) -> None:
        def dropped(group: ProcessGroup) -> bool:
            x = torch.ones(100_000)
            alive = weakref.ref(x)
            group.all_reduce(x).wait()
            del x
            until(lambda: alive() is None)  # another thread may have completed it, and be on its way out
            return True

        assert all(self.run(dropped, 2))

    def test_memory_of_the_channel_is_memory(self) -> None:
        def owned(group: ProcessGroup) -> None:
            x = group.empty(3, 5, dtype=torch.int64).fill_(group.rank)
            assert x.shape == (3, 5)
            group.all_reduce(x).wait()
            assert x.eq(sum(range(group.size))).all()
            assert group.empty(0).numel() == 0

        self.run(owned, 2)

    # -- messages ------------------------------------------------------------------------------

    def test_messages_are_matched_by_tag_and_keep_their_order(self) -> None:
        def exchange(group: ProcessGroup) -> None:
            if group.rank == 0:
                wait_all([group.send(torch.tensor([i, tag]), 1, tag) for i in range(20) for tag in (3, 4)])
            else:
                for tag in (4, 3):
                    got = [group.recv(torch.empty(2, dtype=torch.int64), 0, tag) for _ in range(20)]
                    assert [future.wait().tolist() for future in got] == [[i, tag] for i in range(20)]

        self.run(exchange, 2)

    def test_a_receiver_without_a_buffer_gets_dtype_and_shape(self) -> None:
        def exchange(group: ProcessGroup) -> None:
            for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.uint16):
                x = data(dtype, 24).reshape(2, 3, 4)
                if group.rank == 0:
                    group.send(x, 1)
                    group.send(x[0, 0, 0], 1)
                    group.send(x[:0], 1)
                else:
                    assert identical(group.recv(None, 0).wait(), x)
                    assert identical(group.recv(None, 0).wait(), x[0, 0, 0])
                    assert identical(group.recv(None, 0).wait(), x[:0])

        self.run(exchange, 2)

    def test_messages_are_received_from_any_source(self) -> None:
        def collect(group: ProcessGroup) -> None:
            if group.rank:
                group.send(torch.tensor(group.rank), 0, tag=9).wait()
                return
            messages = [group.recv_message(tag=9) for _ in range(group.size - 1)]
            arrived = [message.wait() for message in messages]
            assert sorted(message.source for message in arrived) == list(range(1, group.size))
            assert all(message.tensor.item() == message.source and message.tag == 9 for message in arrived)

        self.run(collect, 4)

    def test_a_message_may_be_sent_long_before_it_is_received(self) -> None:
        def early(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.send(torch.arange(10), 1).wait()
            group.barrier().wait()
            if group.rank == 1:
                assert group.recv(None, 0).wait().tolist() == list(range(10))

        self.run(early, 2)

    # -- callbacks -----------------------------------------------------------------------------

    @pytest.mark.concurrency
    def test_operations_in_callbacks_match_whatever_order_they_run_in(self) -> None:
        def chained(group: ProcessGroup) -> None:
            shuffle = random.Random(group.rank)

            def again(factor: int, done: Future[torch.Tensor]) -> torch.Tensor:
                time.sleep(shuffle.random() * 0.002)
                return group.all_reduce(done.value() * factor).wait()

            for _ in range(10):
                first = [group.all_reduce(torch.tensor([i])) for i in range(10)]
                chains = [future.then(lambda f, i=i: again(i, f)) for i, future in enumerate(first)]
                plain = [group.all_reduce(torch.tensor([i])) for i in range(10)]
                size = group.size
                assert [f.wait().item() for f in plain] == [i * size for i in range(10)]
                assert [f.wait().item() for f in chains] == [i * size * i * size for i in range(10)]

        self.run(chained, 3)

    # -- subgroups -----------------------------------------------------------------------------

    def test_groups_over_the_same_processes_do_not_mix(self) -> None:
        def several(group: ProcessGroup) -> None:
            rows, columns = group.split(group.rank // 2), group.split(group.rank % 2)
            assert rows is not None
            assert columns is not None
            futures = []
            for _ in range(20):
                xs = [torch.tensor(float(group.rank)) for _ in range(3)]
                futures.append([g.all_reduce(x) for g, x in zip((group, rows, columns), xs, strict=True)])
            expected = [6.0, float(sum(rows.ranks)), float(sum(columns.ranks))]
            for triple in reversed(futures):
                assert [future.wait().item() for future in triple] == expected
            rows.close()
            assert group.all_reduce(torch.ones(1)).wait().item() == 4.0
            assert columns.all_reduce(torch.ones(1)).wait().item() == 2.0
            columns.close()

        self.run(several, 4)

    def test_a_group_is_used_before_another_member_has_made_it(self) -> None:
        def uneven(group: ProcessGroup) -> None:
            if group.rank == 0:
                part = group.subgroup([0, 1])
                early = part.all_reduce(torch.ones(1))
                group.barrier().wait()
                assert early.wait().item() == 2.0
            else:
                group.barrier().wait()
                part = group.subgroup([0, 1])
                assert part.all_reduce(torch.ones(1)).wait().item() == 2.0
            part.close()

        self.run(uneven, 2)

    # -- failures ------------------------------------------------------------------------------

    def test_a_timeout_names_the_operation_and_who_did_not_come(self) -> None:
        late, here = threading.Event(), threading.Barrier(2)

        def absent(group: ProcessGroup) -> None:
            if group.rank == 2:
                late.wait(PATIENCE)
                raises_here(GroupError, lambda: group.barrier().wait())
                return
            if group.rank == 0:
                here.wait(PATIENCE)
                error = raises_here(
                    OperationTimeout, lambda: group.all_reduce(torch.ones(2), timeout=0.3).wait()
                )
                assert 2 in error.ranks  # rank 1 too, if it stood still meanwhile
                assert 0 not in error.ranks
                assert "all_reduce" in str(error)
                late.set()
            else:
                future = group.all_reduce(torch.ones(2))
                here.wait(PATIENCE)  # so it is not late
                raises_here(GroupError, future.wait)
            assert group.state == "broken"
            raises_here(GroupError, lambda: group.barrier().wait())

        self.run(absent, 3)

    def test_giving_up_a_wait_leaves_the_operation_running(self) -> None:
        gave_up = threading.Event()

        def impatient(group: ProcessGroup) -> None:
            if group.rank == 0:
                future = group.all_reduce(torch.ones(1))
                raises_here(WaitTimeout, lambda: future.wait(0.02))
                gave_up.set()
            else:
                gave_up.wait(PATIENCE)
                future = group.all_reduce(torch.ones(1))
            assert future.wait().item() == 2.0

        self.run(impatient, 2)

    @pytest.mark.concurrency
    def test_abort_from_another_thread_wakes_everybody(self) -> None:
        all_waiting = threading.Barrier(3)

        def aborted(group: ProcessGroup) -> None:
            pending = [group.recv(None, (group.rank + 1) % group.size), group.recv()]
            all_waiting.wait(PATIENCE)
            if group.rank == 0:
                threading.Thread(target=group.abort, args=("the test says so",)).start()
            for future in pending:
                error = raises_here(GroupAborted, future.wait)
                assert "the test says so" in str(error)
            assert group.state == "aborted"
            raises_here(GroupAborted, lambda: group.barrier().wait())

        self.run(aborted, 3)

    def test_different_operations_are_a_mismatch_that_names_both(self) -> None:
        calls: list[Callable[[ProcessGroup], Future[Any]]] = [
            lambda group: group.all_reduce(torch.ones(4)),
            lambda group: group.all_reduce(torch.ones(5)),
            lambda group: group.all_reduce(torch.ones(4, dtype=torch.int32)),
            lambda group: group.all_reduce(torch.ones(4), "max"),
            lambda group: group.barrier(),
            lambda group: group.all_gather(torch.ones(4)),
        ]

        def disagree(group: ProcessGroup, other: int) -> str:
            call = calls[other if group.rank else 0]
            return str(raises_here(CollectiveMismatch, lambda: call(group).wait()))

        for other in range(1, len(calls)):
            for text in self.run(disagree, 2, other):
                assert "all_reduce" in text
                assert "rank 0" in text
                assert "rank 1" in text

    def test_different_roots_are_a_mismatch(self) -> None:
        def disagree(group: ProcessGroup) -> None:
            def both() -> None:
                # The first may rightly end on a rank that only sends; the second then tells it.
                group.broadcast(torch.ones(4), root=group.rank).wait()
                group.barrier().wait()

            raises_here(CollectiveMismatch, both)

        self.run(disagree, 2)

    def test_a_message_that_does_not_fit_its_buffer_is_refused(self) -> None:
        def misfit(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.send(torch.ones(4), 1)
                raises_here(GroupError, lambda: group.recv(None, 1).wait())
            else:
                raises_here(CollectiveMismatch, lambda: group.recv(torch.empty(5), 0).wait())

        self.run(misfit, 2)

    # -- the end -------------------------------------------------------------------------------

    def test_what_was_sent_before_close_still_arrives(self) -> None:
        def leave(group: ProcessGroup) -> None:
            if group.rank == 0:
                for i in range(10):
                    group.send(torch.full((1000,), i), 1)
                group.close()
            else:
                for i in range(10):
                    assert group.recv(None, 0).wait().eq(i).all()

        self.run(leave, 2)

    def test_an_operation_that_needs_a_closed_peer_says_so(self) -> None:
        def leave(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.close()
                raises_here(GroupClosed, lambda: group.barrier())
            else:
                raises_here(GroupClosed, lambda: group.recv(None, 0).wait())

        self.run(leave, 2)

    def test_close_does_not_wait_for_a_hung_peer(self) -> None:
        done = threading.Event()

        def hang(group: ProcessGroup) -> None:
            if group.rank == 1:
                assert done.wait(PATIENCE)
                return
            future = group.all_reduce(torch.ones(1))
            group.close(timeout=0.5)
            assert group.state == "closed"
            raises_here(GroupError, future.wait)
            done.set()

        self.run(hang, 2)

    def test_nothing_is_left_behind(self) -> None:
        def work(group: ProcessGroup) -> None:
            with group.split(group.rank % 2) as part:
                part.all_reduce(torch.ones(10)).wait()
            group.all_reduce(torch.ones(10)).wait()

        def ours() -> set[str]:
            # Callback threads of futures end by themselves when they are idle.
            names = {thread.name for thread in threading.enumerate()}
            return {name for name in names if not name.startswith("shoal-callback")}

        before = ours()
        self.run(work, 4)
        assert ours() <= before
