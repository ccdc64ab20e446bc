"""Fixtures of all tests."""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from shoal.backend.registry import register_backend, unregister_backend
from shoal.testing.processes import preload
from tests.support.mpi import NAMES, Mpi, find
from tests.support.quick_launcher import QuickLauncher
from tests.support.store_backend import StoreBackend

pytest_plugins = ["tools.lost_workers"]

# Ranks are threads in most tests and share the cores.  And torch adds in another order with another number of
# threads, which is a setting of each thread: one test's setting would be another's rounding error.
torch.set_num_threads(1)

# A shell starts background jobs with Ctrl-C ignored, and a test that interrupts itself would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Whatever has an optimiser imports the compiler, which takes a second in every rank, and so do the digits.
preload(
    "torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "sklearn.datasets", "sklearn.model_selection",
)  # fmt: skip


# A machine that stands still for a moment makes any example slow, and another one the next time.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


#: Files of few tests that take long.  The processes of ``make test`` begin with them: a file that begins last
#: keeps one process busy while the others have nothing to do.
LONGEST = (
    "backend/test_mpi.py", "controller/test_mpi.py", "compat/launching/test_launchers.py",
    "hosts/test_srun.py", "failure/test_cuts.py", "frontend/test_ddp.py", "frontend/test_groups.py",
    "examples/test_kubernetes.py", "hosts/test_training.py", "failure/test_standstills.py",
    "elastic/test_alike.py", "rendezvous/test_under_slurm.py", "hosts/test_orphans.py",
    "hosts/test_random_kills.py", "launch/test_hosts.py", "compat/frameworks/test_frameworks.py",
    "compat/frameworks/test_page.py",
    "tools/bench/test_command.py", "test_lint.py", "controller/test_kills.py", "examples/test_bytes_lm.py",
    "examples/test_notebook.py", "test_without_numpy.py", "rpc/test_kills.py", "benchmarks/test_scaling.py",
    "examples/test_digits.py", "rendezvous/test_mpi.py", "testing/test_pool.py", "benchmarks/test_gpu.py",
    "backend/test_early_device.py", "backend/test_late_device.py", "compat/ecosystem/test_compile.py",
    "parallel/test_device.py", "failure/test_fork.py", "controller/test_parity.py",
    "controller/test_replacing.py", "controller/test_within.py", "controller/test_models.py",
    "controller/test_curves_of_four.py", "controller/test_many_deaths.py", "examples/test_migration.py",
    "examples/test_elastic_lm.py", "group/test_long_lives.py", "benchmarks/test_bootstrap.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files for several processes: the longest first, then those of many tests before those of few."""
    if not hasattr(config, "workerinput"):  # one process
        return
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (first.get(item.path, len(first)), -count[item.path]))


def pytest_collection_finish() -> None:
    """Let ``gc.collect()`` look only at what the tests make, and not at all of torch each time."""
    gc.collect()
    gc.freeze()
    preload("tests.support.frozen")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Do so for what a file leaves too, such as modules that it imported and reports of its tests."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickLauncher]:
    """``shoal run`` for scripts whose ranks need not start Python and import torch anew."""
    with QuickLauncher(tmp_path_factory.mktemp("launcher")) as launcher:
        yield launcher


@pytest.fixture(params=NAMES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI library of this machine, with its mpiexec."""
    found = find(request.param)
    if isinstance(found, str):
        pytest.skip(f"no ranks of {request.param}: {found}")
    return found


@pytest.fixture
def store_backend() -> Iterator[str]:
    """The name of a backend that needs no native module; it knows all_reduce, all_gather and barrier."""
    register_backend("store", StoreBackend)
    yield "store"
    unregister_backend("store")
