"""The backend "mpi", with real ranks of the mpiexec of each MPI library."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal import Future, ProcessGroup, RendezvousError, UsageError, _core
from shoal.backend.mpi import channel, library
from shoal.backend.mpi.channel import MpiBackend, checked_addresses
from shoal.backend.native.channel import NativeBackend
from shoal.common import mpi_library
from shoal.store import PrefixStore
from shoal.testing import RankPool
from shoal.testing.conformance.cases import (
    CollectiveCase,
    TensorBytes,
    all_cases,
    check_cases,
    run_cases,
)  # fmt: skip
from tests.support.mpi import Mpi

from . import test_training
from .slow_conformance import SlowConformance

#: the ranks of each MPI library; smaller groups use the first ones
_pools: dict[str, RankPool] = {}


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    """End the ranks that the tests of this module have started, of all libraries at the same time."""
    yield
    with ThreadPoolExecutor() as threads:
        list(threads.map(RankPool.close, _pools.values()))
    _pools.clear()


class TestMpi(SlowConformance):  # ranks of MPI wait busily, and keep the cores from other tests
    backend = "mpi"
    mpi: Mpi

    @pytest.fixture(autouse=True)
    def library(self, mpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.mpi = mpi
        self.folder = tmp_path_factory.getbasetemp()

    def test_reductions_in_parts_have_the_same_bits_as_with_the_native_backend(self) -> None:
        def reductions(group: ProcessGroup) -> None:
            native = group.subgroup(range(group.size), backend="native")
            for count in (20_000, 1_200_001):  # reduced in parts, and these in pieces
                for dtype in (torch.float32, torch.bfloat16, torch.int16):
                    for op in ("sum", "max", "avg"):
                        x = (torch.arange(count) % 97 + group.rank).to(dtype)
                        before, expected, at_root = x.clone(), x.clone(), x.clone()
                        native.all_reduce(expected, op).wait()
                        group.reduce(at_root, 1, op).wait()
                        at_root_expected = expected if group.rank == 1 else before
                        assert torch.equal(at_root, at_root_expected), (count, dtype, op)
                        assert torch.equal(group.all_reduce(x, op).wait(), expected), (count, dtype, op)
            pending = [group.all_reduce(torch.full((50_000 + i,), float(i))) for i in range(20)]
            for i in (7, 19, 0, *range(20)):
                assert pending[i].wait().eq(i * group.size).all(), i
            native.close()

        self.run(reductions, 3)

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_reductions_of_mpi_agree_with_the_reference(self) -> None:
        cases = [case for case in all_cases(37, "cpu", messages=False) if case.op]
        assert any(case.collective == "reduce_scatter" for case in cases)
        check_cases(cases, self.run(run_cases, 3, cases, reductions="mpi"), "per hop")

    def test_ranks_that_let_different_libraries_reduce_are_refused(self) -> None:
        def refused(group: ProcessGroup) -> None:
            reductions = "mpi" if group.rank else "native"
            with pytest.raises(RendezvousError, match=r"reductions='.*' here, and another value on rank"):
                shoal.init(backend="mpi", store=group.store, rank=group.rank, size=2, reductions=reductions)
            with pytest.raises(UsageError, match="reductions='none': expected 'native' or 'mpi'"):
                shoal.init(backend="mpi", reductions="none")
            group.barrier().wait()

        self.run(refused, 2)

    def test_the_first_collective_that_mpi_moves_follows_a_barrier(self) -> None:
        def late(group: ProcessGroup) -> None:
            group.barrier().wait()
            assert group.all_reduce(torch.ones(3)).wait().eq(2).all()

        self.run(late, 2)

    def test_a_library_without_large_counts(self) -> None:
        """As those of MPI 3; the other test runs use the functions with large counts where there are some."""

        def small(group: ProcessGroup) -> None:
            counting, others = _core.MpiLibrary.names()
            known = SimpleNamespace(names=lambda: ([], counting + others), make=_core.MpiLibrary.make)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(library, "_core", SimpleNamespace(MpiLibrary=known))
                store = PrefixStore("inner", group.store)
                inner = shoal.init(backend="mpi", store=store, rank=group.rank, size=2)
            with inner:
                x = torch.arange(500_000) + group.rank
                assert torch.equal(inner.all_reduce(x.clone()).wait(), 2 * torch.arange(500_000) + 1)
                parts = inner.all_gather([torch.empty(3), torch.empty(5)], torch.ones(3 + 2 * group.rank))
                assert [part.sum().item() for part in parts.wait()] == [3.0, 5.0]
            group.barrier().wait()

        self.run(small, 2)

    @pytest.mark.parametrize("messages", [True, False], ids=["messages", "collectives"])
    def test_parts_are_passed_by_messages_and_in_larger_groups_by_collectives(self, messages: bool) -> None:
        def moved(group: ProcessGroup, cases: list[CollectiveCase]) -> list[list[TensorBytes] | None]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(channel, "_MAX_EXCHANGING", group.size if messages else group.size - 1)
                store = PrefixStore("inner", group.store)
                with shoal.init(backend="mpi", store=store, rank=group.rank, size=group.size) as inner:
                    return run_cases(inner, cases)

        # Reduced in one step, in two, and sent by another protocol of MPI.
        cases = [
            case
            for count in (5, 9000, 60_000)
            for case in all_cases(count, messages=False)
            if case.dtype in (torch.float32, torch.bfloat16) and case.op in ("", "sum", "max")
        ]
        check_cases(cases, self.run(moved, 4, cases))

    def test_operations_in_callbacks_and_subgroups(self) -> None:
        def chains(group: ProcessGroup) -> None:
            shuffle = random.Random(group.rank)

            def again(i: int, done: Future[torch.Tensor]) -> torch.Tensor:
                time.sleep(shuffle.random() * 0.002)
                return group.all_reduce(done.value() * i).wait()

            for _ in range(5):
                first = [group.all_reduce(torch.tensor([i])) for i in range(10)]
                second = [future.then(lambda f, i=i: again(i, f)) for i, future in enumerate(first)]
                size = group.size
                assert [f.wait().item() for f in second] == [i * size * i * size for i in range(10)]
            part = group.split(group.rank % 2)
            assert part is not None
            futures = [part.all_reduce(torch.ones(100_000)) for _ in range(20)]
            assert all(future.wait().eq(part.size).all() for future in reversed(futures))
            part.close()

        self.run(chains, 4, concurrency=3)

    def test_a_training_has_the_same_bits_as_with_the_native_backend(self) -> None:
        test_training.check(self.run(test_training.trained, 2))

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        pool = _pools.get(self.mpi.name)
        if pool is None:
            environment = self.mpi.environment(self.folder)
            # MPI_Init waits for all processes, and the first group may have fewer.
            pool = RankPool(
                4, launcher=self.mpi.launcher(4), env=environment, prepare=lambda: mpi_library.mpi() and None
            )
            _pools[self.mpi.name] = pool
        return pool.run(fn, *args, size=size, **self.with_defaults(options))


_KILLED = """
import os, signal, time, torch, shoal

group = shoal.init(backend="mpi", timeout=60)
for count in (1, 2_000_000):
    for _ in range(3):
        group.all_reduce(torch.ones(1000)).wait()
    group.barrier().wait()
    if group.rank == 1:
        time.sleep(0.3)
        group.store.set("killed", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1_000_000):
            group.all_reduce(torch.ones(count)).wait()
    except shoal.PeerLost as error:
        took = time.monotonic() - float(group.store.get("killed"))
        size = group.size
        group = group.rebuild(timeout=30)
        total = group.all_reduce(torch.ones(50_000)).wait()[0].item()
        line = f"of {size} lost {error.ranks} after {took:.3f} s: {group.size} sum up to {total}\\n"
        print(line, end="", flush=True)
group.close()
"""


def test_killed_ranks_are_named_and_the_others_go_on(mpi: Mpi, tmp_path: Path) -> None:
    """In small operations, and then in large ones."""
    outcome = mpi.run(4, _KILLED, folder=tmp_path, survives_deaths=True)
    found = re.findall(r"of (\d) lost \(1,\) after ([\d.]+) s: (\d) sum up to ([\d.]+)", outcome.out)
    assert all(float(seconds) < 1.0 for _, seconds, *_ in found), outcome
    ends = sorted((size, left, total) for size, _, left, total in found)
    assert ends == [("3", "2", "2.0")] * 2 + [("4", "3", "3.0")] * 3, outcome


def test_ranks_that_no_mpiexec_started_together_are_refused(tmp_path: Path, mpi: Mpi) -> None:
    program = """
import os, shoal
from shoal.testing import run_threads
from shoal.testing.conformance import BackendConformance
try:
    run_threads(lambda group: None, 2, backend="mpi")
except Exception as error:
    print(error)
"""
    outcome = mpi.execute([*mpi.launcher(1), sys.executable, "-c", program], folder=tmp_path)
    assert "start all of them by one mpiexec" in outcome.out, outcome


def test_options_are_those_of_the_native_backend_and_its_own() -> None:
    assert MpiBackend.option_names() == ["reductions", *(NativeBackend.option_names() or ())]
    with pytest.raises(UsageError, match="takes no argument 'transprt'"):
        shoal.init(backend="mpi", transprt="shm")


def test_invalid_addresses_are_refused() -> None:
    for addresses in ([b"", b""], [b"x" * 8, b"y" * 8], [b"\0" * 4 + b"\1\0\0\0", b"short"]):
        with pytest.raises(RendezvousError, match="valid rank of MPI"):
            checked_addresses(addresses, 0, False, "MPICH")
