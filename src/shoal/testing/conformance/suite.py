"""The contract of ``backend/base.py`` as tests, which go through :class:`~shoal.ProcessGroup` as users do.

Ranks may be threads or processes: they share no objects, and tell each other through ``group.store``.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import pytest
import torch

from ...errors import (
    CollectiveMismatch,
    GroupAborted,
    GroupClosed,
    GroupError,
    OperationTimeout,
    UnsupportedOperation,
    UsageError,
    WaitTimeout,
)
from ...future import Future, wait_all
from ...group import ProcessGroup
from ...store import Store
from ..threads import run_threads
from .cases import all_cases, check_cases, run_cases
from .reference import Rounding, data, identical

#: seconds: enough for a loaded machine, and little enough for a run that fails
TIMEOUT_S = 30.0


def raised(kind: type[BaseException] | tuple[type[BaseException], ...], fn: Callable[[], Any]) -> Any:
    """Return the exception of ``kind`` that ``fn`` raises."""
    with pytest.raises(kind) as caught:
        fn()
    return caught.value


def announce(store: Store, what: str) -> None:
    """Wake the ranks that :func:`wait_for` it."""
    store.set(f"conformance/{what}", b"")


def wait_for(store: Store, what: str) -> None:
    """Wait until a rank of the world has announced it."""
    store.get(f"conformance/{what}", TIMEOUT_S)


def meet(group: ProcessGroup, what: str, size: int | None = None) -> None:
    """Wait until the first ``size`` ranks (None: all) have called this; not an operation of the backend."""
    announce(group.store, f"{what}/{group.rank}")
    for rank in range(group.size if size is None else size):
        wait_for(group.store, f"{what}/{rank}")


def full(count: int, value: float, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of ``count`` equal elements."""
    return torch.full((count,), value, dtype=dtype, device=device)


class BackendConformance:
    """Tests of a backend.  A subclass whose name begins with "Test" names the backend:

        class TestPigeons(BackendConformance):
            backend = "carrier-pigeon"

    The other attributes declare where a backend differs from the defaults, which are those of the native
    backend.  The tests fail if it differs in any other way.

    Attributes:
        backend: name of the backend, which is registered.
        options: arguments of ``shoal.init`` and options of the backend, for all tests.
        devices: the device types of the tensors that the backend accepts.  Collectives are tested on all of
            them, messages on the CPU, and everything else on the first one.  Tensors on another device must
            be refused.
        completes: when a future of an operation on a device other than the CPU is done.  "late": when the
            results are in the outputs, so not before all ranks have submitted the operation.  "early": when
            the work is enqueued on a stream, without waiting for other ranks unless it is the first operation
            of its kind in a group; ``wait()`` then waits for the device.  On the CPU it is always "late".
        rounding: where a reduction of float16 or bfloat16 rounds to that dtype.  "once": it adds in float32
            and rounds the result.  "per hop": it rounds after each addition or multiplication, so that the
            error grows with the number of ranks; results must be within the bound of these roundings.  In
            both cases, all ranks and all runs must have equal bits.
        messages: whether the backend has ``send`` and ``recv``.  If False, it must refuse them
            (``DataChannel.supports``).
    """

    backend: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    completes: ClassVar[Literal["early", "late"]] = "late"
    rounding: ClassVar[Rounding] = "once"
    messages: ClassVar[bool] = True

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        """Run ``fn(group, *args)`` on ``size`` ranks and return the results in rank order.

        The default runs threads.  Override it to run the ranks in another way, such as on a
        :class:`~shoal.testing.RankPool`; ``fn`` is a closure, and only uses objects that can be pickled.

        Args:
            options: ``timeout`` and ``op_timeout`` as for ``run_threads``, the backend, and its options; pass
                them on as ``**self.with_defaults(options)``.

        Raises:
            RemoteError: a rank raised.
        """
        return run_threads(fn, size, *args, **self.with_defaults(options))

    def with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of :meth:`run` with those of the class and with timeouts."""
        defaults = {"backend": self.backend, "timeout": 2 * TIMEOUT_S, "op_timeout": TIMEOUT_S}
        return {**defaults, **self.options, **options}

    def _need_messages(self) -> None:
        if not self.messages:
            pytest.skip("the backend declares messages = False")

    # -- results -------------------------------------------------------------------------------

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        for device in self.devices:
            cases = all_cases(37, device, messages=self.messages)
            check_cases(cases, self.run(run_cases, size, cases), self.rounding)

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_empty_tensors_pass_every_collective(self) -> None:
        for device in self.devices:
            cases = [case for case in all_cases(0, device, messages=self.messages) if case.legal]
            check_cases(cases, self.run(run_cases, 3, cases), self.rounding)

    def test_results_have_the_same_bits_in_every_run(self) -> None:
        def sums(group: ProcessGroup, devices: Sequence[str]) -> list[torch.Tensor]:
            counts = [(count, device) for count in (7, 5000, 200_000) for device in devices]
            xs = [data(torch.float32, count, group.rank).to(device, copy=True) for count, device in counts]
            return [x.cpu() for x in wait_all([group.all_reduce(x) for x in xs])]

        first, second = self.run(sums, 3, self.devices), self.run(sums, 3, self.devices)
        for rank in range(3):
            for x, y, z in zip(first[0], first[rank], second[rank], strict=True):
                assert identical(x, y)
                assert identical(x, z)

    def test_a_tensor_larger_than_any_buffer_is_reduced(self) -> None:
        def largest(group: ProcessGroup, devices: Sequence[str]) -> None:
            for device in devices:
                x = full(3_000_001, float(group.rank + 1), device)
                assert group.all_reduce(x).wait().eq(3.0).all().item()

        self.run(largest, 2, self.devices)

    def test_many_operations_in_flight_complete_in_any_order_of_waiting(self) -> None:
        def shuffled(group: ProcessGroup, devices: Sequence[str]) -> None:
            for device in devices:
                xs = [full(i % 50 + 1, float(i), device) for i in range(200)]
                futures = list(enumerate([group.all_reduce(x) for x in xs]))
                random.Random(group.rank).shuffle(futures)
                for i, future in futures:
                    assert future.wait().eq(float(i * group.size)).all().item()

        self.run(shuffled, 3, self.devices)

    def test_a_tensor_is_released_after_the_wait(self) -> None:
        def dropped(group: ProcessGroup, device: str) -> None:
            x = full(100_000, 1.0, device)
            released = threading.Event()
            weakref.finalize(x, released.set)
            group.all_reduce(x).wait()
            del x
            assert released.wait(TIMEOUT_S)  # another thread that completed it may still hold it for a moment

        self.run(dropped, 2, self.devices[0])

    def test_memory_of_the_channel_is_memory(self) -> None:
        def owned(group: ProcessGroup, devices: Sequence[str]) -> None:
            for device in devices:
                x = group.empty(3, 5, dtype=torch.int64, device=device).fill_(group.rank)
                assert x.shape == (3, 5)
                assert x.device.type == device
                group.all_reduce(x).wait()
                assert x.eq(sum(range(group.size))).all().item()
                assert group.empty(0, device=device).numel() == 0

        self.run(owned, 2, self.devices)

    def test_a_tensor_on_an_undeclared_device_is_refused(self) -> None:
        def refused(group: ProcessGroup) -> None:
            raised(UsageError, lambda: group.all_reduce(full(3, 1.0, "meta")))
            group.barrier().wait()

        self.run(refused, 2)

    def test_a_future_is_done_as_declared(self) -> None:
        devices, completes = self.devices, self.completes

        def submitted_first(group: ProcessGroup) -> None:
            for device in devices:
                x = full(10, 1.0, device)
                group.all_reduce(x.clone()).wait()  # may have to connect
                if group.rank == 0:
                    future = group.all_reduce(x)
                    if completes == "early" and device != "cpu":
                        end = time.monotonic() + TIMEOUT_S
                        while not future.done():
                            assert time.monotonic() < end
                            time.sleep(0.001)
                    else:
                        assert not future.done()
                    announce(group.store, device)
                else:
                    wait_for(group.store, device)
                    future = group.all_reduce(x)
                assert future.wait().eq(2.0).all().item()
                assert future.done()

        self.run(submitted_first, 2)

    # -- messages ------------------------------------------------------------------------------

    def test_messages_are_sent_or_refused_as_declared(self) -> None:
        messages = self.messages

        def exchange(group: ProcessGroup) -> None:
            x, y, other = full(3, float(group.rank)), full(3, 5.0), 1 - group.rank
            if messages:
                pair: list[Future[Any]] = [group.send(x, other), group.recv(y, other)]
                wait_all(pair)
                assert y.tolist() == [float(other)] * 3
            else:
                raised(UnsupportedOperation, lambda: group.send(x, other))
                raised(UnsupportedOperation, lambda: group.recv(y, other))
            group.barrier().wait()

        self.run(exchange, 2)

    def test_messages_are_matched_by_tag_and_keep_their_order(self) -> None:
        self._need_messages()

        def exchange(group: ProcessGroup) -> None:
            if group.rank == 0:
                sent = [(i, tag) for i in range(20) for tag in (3, 4)]
                wait_all([group.send(torch.tensor([i, tag], device="cpu"), 1, tag) for i, tag in sent])
            else:
                for tag in (4, 3):
                    got = [group.recv(full(2, 0, dtype=torch.int64), 0, tag) for _ in range(20)]
                    assert [future.wait().tolist() for future in got] == [[i, tag] for i in range(20)]

        self.run(exchange, 2)

    def test_a_message_larger_than_any_buffer_is_received(self) -> None:
        self._need_messages()

        def exchange(group: ProcessGroup) -> None:
            x, y = full(3_000_001, float(group.rank + 1)), full(3_000_001, 0.0)
            pair: list[Future[Any]] = [group.send(x, 1 - group.rank), group.recv(y, 1 - group.rank)]
            wait_all(pair)
            assert y.eq(2.0 - group.rank).all()

        self.run(exchange, 2)

    def test_a_receiver_without_a_buffer_gets_dtype_and_shape(self) -> None:
        self._need_messages()

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
        self._need_messages()

        def collect(group: ProcessGroup) -> None:
            if group.rank:
                group.send(torch.tensor(group.rank, device="cpu"), 0, tag=9).wait()
                return
            messages = [group.recv_message(tag=9) for _ in range(group.size - 1)]
            arrived = [message.wait() for message in messages]
            assert sorted(message.source for message in arrived) == list(range(1, group.size))
            assert all(message.tensor.item() == message.source and message.tag == 9 for message in arrived)

        self.run(collect, 4)

    def test_a_message_may_be_sent_long_before_it_is_received(self) -> None:
        self._need_messages()

        def early(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.send(full(10, 7.0), 1).wait()
            group.barrier().wait()
            if group.rank == 1:
                assert group.recv(None, 0).wait().tolist() == [7.0] * 10

        self.run(early, 2)

    def test_a_message_that_does_not_fit_its_buffer_is_refused(self) -> None:
        self._need_messages()

        def misfit(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.send(full(4, 1.0), 1)
                raised(GroupError, lambda: group.recv(None, 1).wait())
            else:
                raised(CollectiveMismatch, lambda: group.recv(full(5, 0.0), 0).wait())

        self.run(misfit, 2)

    def test_messages_sent_before_close_still_arrive(self) -> None:
        self._need_messages()

        def leave(group: ProcessGroup) -> None:
            if group.rank == 0:
                for i in range(10):
                    group.send(full(1000, i), 1)
                group.close()
            else:
                for i in range(10):
                    assert group.recv(None, 0).wait().eq(i).all()

        self.run(leave, 2)

    # -- callbacks -----------------------------------------------------------------------------

    def test_operations_in_callbacks_match_in_any_order(self) -> None:
        def chained(group: ProcessGroup, device: str) -> None:
            shuffle = random.Random(group.rank)

            def again(factor: int, done: Future[torch.Tensor]) -> torch.Tensor:
                time.sleep(shuffle.random() * 0.002)
                return group.all_reduce(done.value() * factor).wait()

            def submit() -> list[Future[torch.Tensor]]:
                return [group.all_reduce(full(1, i, device, dtype=torch.int64)) for i in range(10)]

            for _ in range(10):
                chains = [future.then(partial(again, i)) for i, future in enumerate(submit())]
                plain = submit()
                size = group.size
                assert [f.wait().item() for f in plain] == [i * size for i in range(10)]
                assert [f.wait().item() for f in chains] == [i * size * i * size for i in range(10)]

        self.run(chained, 3, self.devices[0])

    # -- subgroups -----------------------------------------------------------------------------

    def test_groups_over_the_same_processes_do_not_mix(self) -> None:
        def several(group: ProcessGroup, device: str) -> None:
            rows, columns = group.split(group.rank // 2), group.split(group.rank % 2)
            assert rows is not None
            assert columns is not None
            futures = []
            for _ in range(20):
                xs = [full(1, group.rank, device) for _ in range(3)]
                futures.append([g.all_reduce(x) for g, x in zip((group, rows, columns), xs, strict=True)])
            expected = [6.0, float(sum(rows.ranks)), float(sum(columns.ranks))]
            for triple in reversed(futures):
                assert [future.wait().item() for future in triple] == expected
            rows.close()
            assert group.all_reduce(full(1, 1.0, device)).wait().item() == 4.0
            assert columns.all_reduce(full(1, 1.0, device)).wait().item() == 2.0
            columns.close()

        self.run(several, 4, self.devices[0])

    def test_a_group_is_used_before_another_member_has_made_it(self) -> None:
        def uneven(group: ProcessGroup, device: str) -> None:
            if group.rank == 0:
                part = group.subgroup([0, 1])
                early = part.all_reduce(full(1, 1.0, device))
                group.barrier().wait()
                assert early.wait().item() == 2.0
            else:
                group.barrier().wait()
                part = group.subgroup([0, 1])
                assert part.all_reduce(full(1, 1.0, device)).wait().item() == 2.0
            part.close()

        self.run(uneven, 2, self.devices[0])

    # -- failures ------------------------------------------------------------------------------

    def test_a_timeout_names_the_operation_and_the_late_rank(self) -> None:
        def late(group: ProcessGroup, device: str) -> None:
            if group.rank == 2:
                wait_for(group.store, "timeout")
                raised(GroupError, lambda: group.barrier().wait())
                return
            if group.rank == 0:
                meet(group, "submitted", 2)
                error = raised(
                    OperationTimeout, lambda: group.all_reduce(full(2, 1.0, device), timeout=0.3).wait()
                )
                assert 2 in error.ranks  # and rank 1, if it was not scheduled meanwhile
                assert 0 not in error.ranks
                assert "all_reduce" in str(error)
                announce(group.store, "timeout")
            else:
                future = group.all_reduce(full(2, 1.0, device))
                meet(group, "submitted", 2)
                raised(GroupError, future.wait)
            assert group.state == "broken"
            raised(GroupError, lambda: group.barrier().wait())

        self.run(late, 3, self.devices[0])

    def test_a_wait_that_times_out_leaves_the_operation_running(self) -> None:
        def impatient(group: ProcessGroup, device: str) -> None:
            if group.rank == 0:
                future = group.all_reduce(full(1, 1.0, device))
                raised(WaitTimeout, lambda: future.wait(0.02))
                announce(group.store, "timeout")
            else:
                wait_for(group.store, "timeout")
                future = group.all_reduce(full(1, 1.0, device))
            assert future.wait().item() == 2.0

        self.run(impatient, 2, self.devices[0])

    def test_an_abort_in_another_thread_ends_the_waits_of_all_ranks(self) -> None:
        device, messages = self.devices[0], self.messages

        def aborted(group: ProcessGroup) -> None:
            pending: list[Future[Any]] = []
            if messages:
                pending = [group.recv(None, (group.rank + 1) % group.size), group.recv()]
            if group.rank:  # rank 0 does not submit it
                pending.append(group.all_reduce(full(3, 1.0, device)))
            meet(group, "waiting")
            if group.rank == 0:
                threading.Thread(target=group.abort, args=("the reason",)).start()
            for future in pending:
                assert "the reason" in str(raised(GroupAborted, future.wait))
            # If rank 0 has no pending operation, the thread may still be starting.
            end = time.monotonic() + TIMEOUT_S
            while group.state != "aborted" and time.monotonic() < end:
                time.sleep(0.001)
            assert group.state == "aborted"
            raised(GroupAborted, lambda: group.barrier().wait())

        self.run(aborted, 3)

    def test_different_operations_are_a_mismatch_that_names_both(self) -> None:
        device = self.devices[0]
        calls: list[Callable[[ProcessGroup], Future[Any]]] = [
            lambda group: group.all_reduce(full(4, 1.0, device)),
            lambda group: group.all_reduce(full(5, 1.0, device)),
            lambda group: group.all_reduce(full(4, 1, device, dtype=torch.int32)),
            lambda group: group.all_reduce(full(4, 1.0, device), "max"),
            lambda group: group.barrier(),
            lambda group: group.all_gather(full(4, 1.0, device)),
        ]

        def disagree(group: ProcessGroup, other: int) -> str:
            call = calls[other if group.rank else 0]
            return str(raised(CollectiveMismatch, lambda: call(group).wait()))

        for other in range(1, len(calls)):
            for text in self.run(disagree, 2, other):
                assert "all_reduce" in text
                assert "rank 0" in text
                assert "rank 1" in text

    def test_different_roots_are_a_mismatch(self) -> None:
        def disagree(group: ProcessGroup, device: str) -> None:
            def both() -> None:
                # The first may complete on a rank that only sends; the second then raises.
                group.broadcast(full(4, 1.0, device), root=group.rank).wait()
                group.barrier().wait()

            raised(CollectiveMismatch, both)

        self.run(disagree, 2, self.devices[0])

    # -- closing -------------------------------------------------------------------------------

    def test_an_operation_that_needs_a_closed_peer_raises(self) -> None:
        def leave(group: ProcessGroup, device: str) -> None:
            if group.rank == 0:
                group.close()
                raised(GroupClosed, lambda: group.barrier())
            else:
                raised(GroupClosed, lambda: group.all_reduce(full(1, 1.0, device)).wait())

        self.run(leave, 2, self.devices[0])

    def test_a_receive_from_a_closed_peer_raises(self) -> None:
        self._need_messages()

        def leave(group: ProcessGroup) -> None:
            if group.rank == 0:
                group.close()
            else:
                raised(GroupClosed, lambda: group.recv(None, 0).wait())

        self.run(leave, 2)

    def test_close_does_not_wait_for_a_hung_peer(self) -> None:
        def hang(group: ProcessGroup, device: str) -> None:
            with group.store.clone() as store:  # that of the group is closed with it
                if group.rank == 1:
                    wait_for(store, "closed")
                    return
                future = group.all_reduce(full(1, 1.0, device))
                group.close(timeout=0.5)
                assert group.state == "closed"
                raised(GroupError, future.wait)
                announce(store, "closed")

        self.run(hang, 2, self.devices[0])

    def test_no_thread_is_left_behind(self) -> None:
        device = self.devices[0]

        def threads(group: ProcessGroup) -> set[str]:
            group.barrier().wait()
            # Callback threads of futures end by themselves when they are idle.
            names = {thread.name for thread in threading.enumerate()}
            group.barrier().wait()
            return {name for name in names if not name.startswith("shoal-callback")}

        def work(group: ProcessGroup) -> None:
            part = group.split(group.rank % 2)
            assert part is not None
            with part:
                part.all_reduce(full(10, 1.0, device)).wait()
            group.all_reduce(full(10, 1.0, device)).wait()

        before = self.run(threads, 4)
        self.run(work, 4)
        for rank, names in enumerate(self.run(threads, 4)):
            assert names <= before[rank]
