"""The backend "mpi", with real ranks of the mpiexec of each MPI library."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import RendezvousError
from shoal.backend.mpi.engine import MpiEngine
from shoal.testing import RankPool
from shoal.testing.conformance import BackendConformance
from tests.support.mpi import Mpi

_pools: dict[tuple[str, int], RankPool] = {}


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    """End the ranks that the tests of this module have started."""
    yield
    for pool in _pools.values():
        pool.close()
    _pools.clear()


class TestMpi(BackendConformance):
    backend = "mpi"
    mpi: Mpi

    @pytest.fixture(autouse=True)
    def library(self, mpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.mpi = mpi
        self.folder = tmp_path_factory.getbasetemp()

    # The rest takes half a minute, and keeps the cores from other tests: ranks of MPI wait busily.
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize(
        "size", [1, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
    )
    def test_every_collective_dtype_and_reduction_agrees_with_the_reference(self, size: int) -> None:
        super().test_every_collective_dtype_and_reduction_agrees_with_the_reference(size)

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        pool = _pools.get((self.mpi.name, size))
        if pool is None:
            environment = self.mpi.environment(self.folder)
            pool = RankPool(size, launcher=self.mpi.launcher(size), env=environment)
            _pools[self.mpi.name, size] = pool
        return pool.run(fn, *args, **self.with_defaults(options))


_LARGE = """
import torch, shoal

with shoal.init(backend="mpi", timeout=60) as group:
    native = group.subgroup(range(group.size), backend="native")
    for count in (20_000, 300_001):  # reduced in parts
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            for op in ("sum", "max", "avg"):
                x = (torch.arange(count) % 97 + group.rank).to(dtype)
                expected, at_root = x.clone(), x.clone()
                native.all_reduce(expected, op).wait()
                group.reduce(at_root, 1, op).wait()
                before = (torch.arange(count) % 97 + group.rank).to(dtype)
                assert torch.equal(at_root, expected if group.rank == 1 else before), (count, dtype, op)
                assert torch.equal(group.all_reduce(x, op).wait(), expected), (count, dtype, op)
    pending = [group.all_reduce(torch.full((50_000 + i,), float(i))) for i in range(20)]  # in flight together
    for i in (7, 19, 0, *range(20)):
        assert pending[i].wait().eq(i * group.size).all(), i
    print("right\\n", end="", flush=True)
"""

_TRAINING = """
import torch, shoal

def trained(group):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    model = shoal.DistributedDataParallel(net, group=group)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(group.rank)
    for _ in range(5):
        optimiser.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimiser.step()
    return [parameter.detach().clone() for parameter in net.parameters()]

torch.set_num_threads(1)
with shoal.init(backend="mpi", timeout=60) as group:
    with group.subgroup(range(group.size), backend="native") as native:
        expected = trained(native)
    assert all(torch.equal(x, y) for x, y in zip(trained(group), expected, strict=True))
    print("right\\n", end="", flush=True)
"""

_CALLBACKS = """
import random, time, torch, shoal

with shoal.init(backend="mpi", timeout=60) as group:
    shuffle = random.Random(group.rank)
    def again(i, done):
        time.sleep(shuffle.random() * 0.002)
        return group.all_reduce(done.value() * i).wait()
    for _ in range(5):
        first = [group.all_reduce(torch.tensor([i])) for i in range(10)]
        chains = [future.then(lambda f, i=i: again(i, f)) for i, future in enumerate(first)]
        size = group.size
        assert [f.wait().item() for f in chains] == [i * size * i * size for i in range(10)]
    part = group.split(group.rank % 2)
    futures = [part.all_reduce(torch.ones(100_000)) for _ in range(20)]
    assert all(future.wait().eq(part.size).all() for future in reversed(futures))
    part.close()
    print("right\\n", end="", flush=True)
"""

_KILLED = """
import os, signal, sys, time, torch, shoal

group = shoal.init(backend="mpi", timeout=60)
for _ in range(3):
    group.all_reduce(torch.ones(1000)).wait()
group.barrier().wait()
clock = group.store
if group.rank == 1:
    time.sleep(0.3)
    clock.set("killed", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(1_000_000):
        group.all_reduce(torch.ones({count})).wait()
except shoal.PeerLost as error:
    took = time.monotonic() - float(clock.get("killed"))
    print(f"rank {{group.rank}} lost {{error.ranks}} after {{took:.3f}} s", flush=True)
    new = group.rebuild(timeout=30)
    print(f"rebuilt {{new.size}}: {{new.all_reduce(torch.ones(50_000)).wait()[0].item()}}", flush=True)
    new.close()
"""

_TORCH = """
import torch, torch.distributed as dist, shoal

dist.init_process_group("shoal")
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x.tolist() == [3.0] * 3
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(2, 4)).sum().backward()
print(type(shoal.world.open_groups()[0]._backend).__name__ + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_reductions_in_parts_have_the_same_bits_as_with_the_native_backend(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(3, _LARGE, folder=tmp_path)
    assert outcome.out.split() == ["right"] * 3, outcome
    assert outcome.code == 0, outcome


def test_operations_in_callbacks_and_subgroups(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(4, _CALLBACKS, folder=tmp_path)
    assert outcome.out.split() == ["right"] * 4, outcome


def test_a_training_has_the_same_bits_as_with_the_native_backend(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _TRAINING, folder=tmp_path)
    assert outcome.out.split() == ["right"] * 2, outcome


@pytest.mark.parametrize("count", [1, 2_000_000])
def test_a_killed_rank_is_named_and_the_others_go_on(mpi: Mpi, count: int, tmp_path: Path) -> None:
    outcome = mpi.run(3, _KILLED.format(count=count), folder=tmp_path, survives_deaths=True)
    found = re.findall(r"rank (\d) lost [\[(]1,?[\])] after ([\d.]+) s", outcome.out)
    assert sorted(rank for rank, _ in found) == ["0", "2"], outcome
    assert all(float(seconds) < 1.0 for _, seconds in found), outcome
    assert outcome.out.count("rebuilt 2: 2.0") == 2, outcome


def test_the_backend_of_torch_uses_it_by_a_variable(mpi: Mpi, tmp_path: Path) -> None:
    outcome = mpi.run(2, _TORCH, folder=tmp_path, env={"SHOAL_BACKEND": "mpi"})
    assert outcome.out.split() == ["MpiBackend"] * 2, outcome


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


def test_invalid_addresses_are_refused() -> None:
    engine = MpiEngine.__new__(MpiEngine)
    engine._rank, engine._size = 0, 2
    for addresses in ([b"", b""], [b"x" * 8, b"y" * 8], [b"\0" * 4 + b"\1\0\0\0", b"short"]):
        with pytest.raises(RendezvousError, match="valid rank of MPI"):
            engine.connect(addresses)
