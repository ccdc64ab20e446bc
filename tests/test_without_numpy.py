"""Everything but ``shoal bench`` works where numpy is not installed.

A virtual environment has links to all packages of the running environment except numpy.  The tests run there:
the import of every module, a program on two ranks, a newcomer of a session, and programs of the pages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).resolve().parent.parent

#: torch warns once in each process that numpy is missing, and pytest makes errors of warnings
QUIET = "ignore:Failed to initialize NumPy"

#: runs Python with these arguments in ``folder``, and returns its standard output
Run = Callable[..., str]

MODULES = """
import importlib
import pkgutil

import torch

import shoal

try:
    torch.zeros(1).numpy()
except RuntimeError as error:
    assert str(error) == "Numpy is not available"
else:
    raise AssertionError("numpy is there")
names = [module.name for module in pkgutil.walk_packages(shoal.__path__, "shoal.")]
names = [name for name in names if not name.startswith("shoal.tools.bench") and name != "shoal.__main__"]
for name in names:
    importlib.import_module(name)
print(shoal.__file__, len(names))
"""

PROGRAM = """
import traceback

import torch
import torch.distributed
from torch import nn

import shoal
import shoal.distributed


def value(rank):
    return {"rank": rank, "tensor": torch.full((3,), float(rank)), "bytes": b"x" * (rank << 20)}


def same(got, rank):
    want = value(rank)
    return got["tensor"].equal(want["tensor"]) and (got["rank"], got["bytes"]) == (rank, want["bytes"])


def objects_of_a_group(group):
    mine, other = value(group.rank), 1 - group.rank
    assert all(map(same, group.all_gather_object(mine).wait(), (0, 1)))
    gathered = group.gather_object(mine, root=1).wait()
    assert all(map(same, gathered, (0, 1))) if group.rank == 1 else gathered is None
    assert same(group.broadcast_object(mine, root=1).wait(), 1)
    assert same(group.scatter_object([value(0), value(1)] if group.rank == 0 else None).wait(), group.rank)
    sent = group.send_object(mine, other)
    assert same(group.recv_object(other).wait(), other)
    sent.wait()


def objects_of(dist, check):
    # torch's names for them, which ``dist`` has.
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    objects = [None, None]
    check(lambda: dist.all_gather_object(objects, value(rank)), lambda: map(same, objects, (0, 1)))
    gathered = [None, None] if rank == 1 else None
    check(lambda: dist.gather_object(value(rank), gathered, dst=1), lambda: map(same, gathered or [], (0, 1)))
    given = [value(rank)]
    check(lambda: dist.broadcast_object_list(given, src=1), lambda: [same(given[0], 1)])
    got, parts = [None], [value(0), value(1)] if rank == 0 else None
    check(lambda: dist.scatter_object_list(got, parts), lambda: [same(got[0], rank)])
    messages = [None]
    for sender in (0, 1):
        if rank == sender:
            check(lambda: dist.send_object_list([value(rank)], other), list)
        else:
            check(lambda: dist.recv_object_list(messages, other), lambda: [same(messages[0], other)])
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [1.0] * 4


def succeeds(call, checked):
    call()
    assert all(checked())


def succeeds_unless_torch_itself_needs_numpy(call, checked):
    # The functions of torch.distributed unpickle what arrived by a function of torch, whatever the backend.
    try:
        call()
    except RuntimeError as error:
        assert str(error) == "Numpy is not available"
        *_, last = traceback.extract_tb(error.__traceback__)
        assert last.name == "_tensor_to_object", last
        assert last.filename == torch.distributed.distributed_c10d.__file__
    else:
        assert all(checked())


def train(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


with shoal.init() as group:
    objects_of_a_group(group)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    model = shoal.DistributedDataParallel(net, group=group)
    optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group=group, lr=1e-3)
    train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if group.rank == 0:
        state = optimizer.state_dict()["state"]
        assert sorted(state) == [0, 1, 2, 3]
        assert all(each["step"] == 3 for each in state.values())
    with shoal.rpc.join(group=group) as agent:
        if group.rank == 0:
            assert agent.peer(1).call(torch.add, torch.ones(2), 1).wait().tolist() == [2.0, 2.0]
            assert same(agent.peer(1).call(value, 1).wait(), 1)

shoal.distributed.init_process_group()
objects_of(shoal.distributed, succeeds)
shoal.distributed.destroy_process_group()

torch.distributed.init_process_group("shoal")
objects_of(torch.distributed, succeeds_unless_torch_itself_needs_numpy)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
rank = torch.distributed.get_rank()
torch.distributed.destroy_process_group()
print("rank", rank, "is done")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run Python with these arguments, in this folder, in an environment that has no numpy."""
    root = tmp_path_factory.mktemp("without_numpy")
    venv.create(root, symlinks=True)
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "shoal").symlink_to(Path(shoal.__file__).parent)
    folders = []
    for folder in map(Path, sys.path):
        if folder.is_dir() and any(folder.glob("*.dist-info")):
            folders.append(root / f"packages{len(folders)}")
            folders[-1].mkdir()
            for entry in folder.iterdir():
                if not entry.name.startswith("numpy") and entry.name != "shoal":
                    (folders[-1] / entry.name).symlink_to(entry)
    (packages / "links.pth").write_text("\n".join(map(str, folders)))
    python = str(root / "bin" / "python")
    ours = ("PYTHON", "PYTEST")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    importing = subprocess.run(
        [python, "-c", "import numpy"], env=variables, stderr=subprocess.PIPE, text=True
    )
    assert "No module named 'numpy'" in importing.stderr

    def run(*arguments: str, folder: Path) -> str:
        command = [python, *arguments]
        result = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def test_every_module_can_be_imported(run: Run, tmp_path: Path) -> None:
    file, count = run("-c", MODULES, folder=tmp_path).split()
    assert Path(file).samefile(shoal.__file__)
    assert int(count) > 300


def test_objects_training_and_calls_work_on_two_ranks(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output = run("-m", "shoal", "run", "-n", "2", str(program), folder=tmp_path)
    assert sorted(output.splitlines()) == [f"[{rank}] rank {rank} is done" for rank in (0, 1)]


@pytest.mark.parametrize(
    "test",
    [
        "tests/elastic/test_newcomers.py::test_newcomers_receive_the_state_and_train_on[shm]",
        # The programs of the pages use little that the program above does not.
        pytest.param("tests/test_docs.py::test_every_program_on_the_pages_runs", marks=pytest.mark.stress),
    ],
    ids=["a newcomer of a session", "programs of the pages"],
)
def test_other_tests_pass(run: Run, tmp_path: Path, test: str) -> None:
    options = "-q", "-W", QUIET, "-p", "no:cacheprovider", "-p", "no:xdist"
    output = run("-m", "pytest", *options, f"--basetemp={tmp_path / 'inside'}", test, folder=ROOT)
    assert re.search(r"^\d+ passed in", output, re.MULTILINE), output
