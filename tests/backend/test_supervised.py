"""Engines under the supervision of the native backend: a third party's, and ones that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from shoal.backend.engine import Communicator, Engine, Setup, Transfer
from shoal.backend.registry import register_backend, unregister_backend
from shoal.backend.supervised import SupervisedBackend
from shoal.errors import CollectiveMismatch, GroupAborted, GroupError, OperationTimeout
from shoal.group import ProcessGroup
from shoal.spec import Operation
from shoal.testing import run_threads
from shoal.testing.conformance import BackendConformance
from tests.support.waiting import until

PATIENCE = 30.0


class TestRelay(BackendConformance):
    backend = "relay"


class HeldTransfer(Transfer):
    """A transfer of the relay that completes only when the test allows it."""

    def __init__(self, engine: type[HeldEngine], rank: int, transfer: Any) -> None:
        self._engine, self._rank, self._transfer = engine, rank, transfer

    def poll(self) -> bool:
        if error := self._engine.errors.get(self._rank):
            raise error
        if self._rank in self._engine.held:
            return False
        complete: bool = self._transfer.poll()
        return complete


class HeldEngine(Engine):
    """The relay, as an engine whose transfers can be held or fail on some ranks."""

    name = "held engine"
    held: ClassVar[set[int]] = set()
    errors: ClassVar[dict[int, Exception]] = {}
    cannot_connect: ClassVar[set[int]] = set()

    def __init__(self, membership: Any) -> None:
        from shoal_relay import RelayEngine

        self._relay = RelayEngine(membership)

    def communicator(self, setup: Setup) -> Communicator:
        spec = setup.spec
        if spec.rank in self.cannot_connect:
            raise OSError("no such network")
        inner = self._relay.communicator(setup)
        engine = type(self)

        class Held(Communicator):
            def start(self, operation: Operation) -> HeldTransfer:
                return HeldTransfer(engine, spec.rank, inner.start(operation))

            def close(self) -> None:
                inner.close()

        return Held()


class HeldBackend(SupervisedBackend):
    name = "held"
    engine_type = HeldEngine


@pytest.fixture(autouse=True)
def held_backend() -> Iterator[None]:
    HeldEngine.held, HeldEngine.errors, HeldEngine.cannot_connect = set(), {}, set()
    register_backend("held", HeldBackend)
    yield
    unregister_backend("held")


def run(fn: Callable[[ProcessGroup], Any], size: int, **options: Any) -> list[Any]:
    defaults = {"backend": "held", "timeout": 2 * PATIENCE, "op_timeout": PATIENCE}
    return run_threads(fn, size, **{**defaults, **options})


def error_of(future: Any) -> GroupError:
    with pytest.raises(GroupError) as caught:
        future.wait()
    return caught.value


def test_data_that_does_not_come_is_a_timeout_that_says_that_all_arrived() -> None:
    HeldEngine.held = {0, 1}

    def held(group: ProcessGroup) -> None:
        error = error_of(group.all_reduce(torch.ones(1), timeout=0.5))
        assert isinstance(error, OperationTimeout | GroupAborted)
        assert "all ranks have arrived, but the data did not come in time" in str(error)

    run(held, 2)


def test_a_failed_engine_aborts_the_group_and_is_named() -> None:
    def failing(group: ProcessGroup) -> None:
        assert group.all_reduce(torch.ones(1)).wait().item() == 3
        group.barrier().wait()
        HeldEngine.held = {0, 2}
        HeldEngine.errors[1] = OSError("cable pulled")
        error = error_of(group.all_reduce(torch.ones(1)))
        assert isinstance(error, GroupAborted)
        assert "rank 1 aborted the group: held engine failed there: OSError: cable pulled" in str(error)
        assert group.state == "aborted"

    run(failing, 3)


def test_a_communicator_that_cannot_be_made_aborts_the_group() -> None:
    HeldEngine.cannot_connect = {1}

    def failing(group: ProcessGroup) -> None:
        error = error_of(group.all_reduce(torch.ones(1)))
        assert "rank 1 aborted the group: held engine failed there: OSError: no such network" in str(error)

    run(failing, 2)


def test_an_engine_that_fails_since_the_calls_differ_is_not_to_blame() -> None:
    def mismatched(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(1)).wait()
        group.barrier().wait()
        HeldEngine.errors[group.rank] = RuntimeError("message truncated")
        if group.rank == 1:
            time.sleep(0.2)  # the engine of rank 0 fails before rank 1 calls
        error = error_of(group.all_reduce(torch.ones(1 + group.rank)))
        assert isinstance(error, CollectiveMismatch)
        assert "all_reduce(float32[1]" in str(error)
        assert "all_reduce(float32[2]" in str(error)

    run(mismatched, 2)


def test_callbacks_run_though_no_thread_waits() -> None:
    def unattended(group: ProcessGroup) -> None:
        ran = threading.Event()
        group.all_reduce(torch.ones(1)).add_done_callback(lambda _: ran.set())
        assert ran.wait(PATIENCE)

    run(unattended, 2)


def test_close_waits_until_a_slow_rank_has_its_data() -> None:
    sent = threading.Event()

    def leave(group: ProcessGroup) -> None:
        x = torch.full((3,), float(group.rank + 1))
        if group.rank == 0:
            group.broadcast(x, root=0).wait()
            threading.Timer(0.5, HeldEngine.held.clear).start()
            begun = time.monotonic()
            group.close()
            assert time.monotonic() - begun > 0.3
            sent.set()
        else:
            HeldEngine.held = {1}
            future = group.broadcast(x, root=0)
            assert not future.done()
            assert future.wait().tolist() == [1.0] * 3

    run(leave, 2)
    assert sent.is_set()


def test_a_waiting_thread_completes_operations_that_were_submitted_before_its_own() -> None:
    def later(group: ProcessGroup) -> None:
        futures = [group.all_reduce(torch.tensor([float(i)])) for i in range(50)]
        assert futures[-1].wait().item() == 2 * 49
        assert all(future.done() for future in futures)

    run(later, 2)


def test_tensors_of_an_incomplete_transfer_are_kept() -> None:
    from shoal.backend import supervised

    HeldEngine.held = {0, 1}
    kept = len(supervised._abandoned)

    def aborted(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(1))
        until(lambda: group._channel._channel.pending)  # type: ignore[attr-defined]
        group.store.set(f"started/{group.rank}", b"")
        if group.rank == 0:
            group.store.wait(["started/1"])
            group.abort("the test says so")
        error_of(future)

    run(aborted, 2)
    assert len(supervised._abandoned) == kept + 2


def test_an_engine_may_do_only_some_operations() -> None:
    from shoal.errors import UnsupportedOperation

    def refused(group: ProcessGroup) -> None:
        with pytest.raises(UnsupportedOperation, match="broadcast"):
            group.broadcast(torch.ones(1))
        assert group.all_reduce(torch.ones(1)).wait().item() == 2

    class Limited(HeldEngine):
        def supports(self, kind: Any, dtype: Any, op: Any) -> bool:
            return kind.name != "BROADCAST"

    HeldBackend.engine_type = Limited
    try:
        run(refused, 2)
    finally:
        HeldBackend.engine_type = HeldEngine
