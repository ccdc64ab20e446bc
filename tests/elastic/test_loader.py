"""Loaders: the batches of steps, read ahead, whatever becomes of the group."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shoal import ProcessGroup, UsageError
from shoal.elastic import Loader, Samples, Session, State, Step
from shoal.elastic.loader import BatchReader, BatchRequest
from shoal.testing import no_leaks, processes

from .training import assert_as_undisturbed, train

LENGTH = 30
PATIENCE = 60.0


@dataclass
class Owner:
    """A session whose group is whatever a test wants."""

    state: State
    group: Any = field(default_factory=lambda: SimpleNamespace(rank=0, size=2, epoch=0))
    active: int | None = None

    @property
    def position(self) -> int:
        return self.state.steps

    def begin_step(self, step: Step) -> None: ...

    def exchange(self, step: Step) -> None: ...

    def recover(self, error: BaseException, progress: Any) -> int | None:
        return None

    def step(self, loader: Loader, *, counts: bool = True) -> Any:
        """The batch of the next step."""
        step = Step(self)
        with contextlib.suppress(LostError), step:
            batch = loader.batch(step)
            assert batch["index"].tolist() == step.indices.tolist()
            if not counts:
                raise LostError
            step.commit()
        return batch

    def resize(self, rank: int, size: int) -> None:
        self.group = SimpleNamespace(rank=rank, size=size, epoch=0)


class LostError(Exception):
    """A step that does not count."""


class Items(Dataset[Any]):
    """Samples that tell who has read them, and what random numbers were drawn for them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.rand(()).item(), random.random(), np.random.random()
        return {"index": index, "reader": os.getpid(), "drawn": torch.tensor(drawn)}


class Together(Items):
    """The same, read several at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


@pytest.fixture
def owner() -> Owner:
    return Owner(State(samples=Samples(LENGTH, batch=8, seed=3)))


@contextlib.contextmanager
def loading(dataset: Any = None, workers: int = 2, **options: Any) -> Iterator[Loader]:
    with no_leaks():
        loader = Loader(Items() if dataset is None else dataset, num_workers=workers, **options)
        yield loader
        loader.close()


@pytest.mark.parametrize("dataset", [Items(), Together()])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_what_the_indices_of_the_step_are(owner: Owner, dataset: Any, workers: int) -> None:
    """Through passes, steps that come again, and groups of other sizes; the same workers read all."""
    readers = set()
    with loading(dataset, workers) as loader:
        for rank, size in [(0, 2), (0, 1), (3, 4), (1, 2), (1, 2)]:
            owner.resize(rank, size)
            for counts in (False, True, True, False, False, True):
                readers |= set(owner.step(loader, counts=counts)["reader"].tolist())
    assert owner.state.steps == 15
    assert len(readers) == (workers or 1)
    assert (os.getpid() in readers) == (workers == 0)


def test_a_step_that_takes_no_batch_is_passed_over(owner: Owner) -> None:
    with loading(workers=1) as loader:
        for skipped in (0, 1, 5):
            owner.step(loader)
            for _ in range(skipped):
                owner.state.step_counts(8)


def test_a_step_draws_the_same_whoever_reads_it_and_whenever() -> None:
    drawn = []
    for workers in (1, 2):
        owner = Owner(State(samples=Samples(LENGTH, batch=8, seed=3)))
        with loading(workers=workers) as loader:
            drawn.append(
                [owner.step(loader, counts=counts)["drawn"].clone() for counts in (True, False, True, True)]
            )
    assert all(map(torch.equal, *drawn))
    first, lost, again, last = drawn[0]
    assert torch.equal(lost, again)
    assert len(torch.cat([first, again, last]).unique()) == 3 * 4 * 3  # of 3 steps 4 samples, 3 numbers each


def test_a_loader_takes_none_of_the_random_numbers_of_a_step(owner: Owner) -> None:
    found = []
    for workers in (0, 1):
        with (
            loading(list(range(LENGTH)), workers) as loader,
            contextlib.suppress(LostError),
            Step(owner) as step,
        ):
            loader.batch(step)
            found.append((torch.rand(()).item(), random.random()))
            raise LostError
    assert found[0] == found[1]


class Gated(Items):
    """A data set that a test looks into while it reads."""

    def __init__(self, reads: Callable[[int], Any]) -> None:
        self.reads = reads

    def __getitem__(self, index: int) -> Any:
        return self.reads(index)


def test_a_worker_skips_what_is_not_wanted_any_more_in_its_midst_too() -> None:
    seen = []

    def reads(index: int) -> int:
        seen.append(index)
        if index == 11:
            reader.drop_before(5)
        return index

    reader = BatchReader(Gated(reads), list, None)
    assert reader[BatchRequest(3, 0, [7, 8])] == (3, [7, 8], None)
    assert reader[BatchRequest(4, 0, [10, 11, 12])] == (4, None, None)
    assert reader[BatchRequest(4, 0, [13])] == (4, None, None)
    assert reader[BatchRequest(5, 0, [14])] == (5, [14], None)
    assert seen == [7, 8, 10, 11, 14]


def test_an_error_of_the_data_set_is_raised_in_its_step_alone(owner: Owner) -> None:
    shares = [owner.state.samples.share(0, 2, after=after).indices.tolist() for after in range(3)]

    def reads(index: int) -> Any:
        if index in (shares[1][0], shares[2][0]):
            raise KeyError(f"no sample {index}")
        return {"index": index}

    with loading(Gated(reads), workers=1) as loader:
        owner.step(loader)
        with pytest.raises(KeyError, match=rf"in worker 0 of a Loader(.|\n)*no sample {shares[1][0]}"):
            owner.step(loader)
        owner.state.step_counts(8)
        owner.resize(1, 2)
        owner.step(loader)  # what was read for rank 0 is dropped with its error


def test_a_worker_finds_the_data_set_of_the_program(owner: Owner) -> None:
    class Named(Items):
        name = "before"

        def __getitem__(self, index: int) -> Any:
            return {"index": index, "name": self.name}

    def begin(worker: int) -> None:
        get_worker_info().dataset.name = f"of worker {worker}"  # type: ignore[union-attr, attr-defined]

    with loading(Named(), workers=2, worker_init_fn=begin) as loader:
        names = [owner.step(loader)["name"][0] for _ in range(2)]
    assert names == ["of worker 0", "of worker 1"]


def test_workers_end_with_the_last_reference_to_their_loader(owner: Owner) -> None:
    with no_leaks(patience=20):
        loader = Loader(Items(), num_workers=1)
        (worker,) = {*owner.step(loader)["reader"].tolist()}
        process = psutil.Process(worker)
        del loader
        assert process.wait(PATIENCE) in (0, None)


def test_what_a_loader_cannot_use_is_refused(owner: Owner) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    for arguments, options, said in (
        ((Items(),), {"batch_size": 4}, r"leave batch_size= out: Samples has it"),
        ((Items(),), {"shuffle": True}, "leave shuffle= out: Samples has a permutation"),
        ((Items(),), {"sampler": [1]}, "leave sampler= out"),
        ((Items(),), {"batch_sampler": [[1]]}, "leave batch_sampler= out"),
        ((Items(),), {"drop_last": True}, "leave drop_last= out: batches are always full"),
        ((Items(),), {"in_order": False}, "leave in_order= out"),
        ((Items(),), {"persistent_workers": False}, "leave persistent_workers= out: workers run until"),
        ((Stream(),), {}, "a Stream has no samples with numbers"),
        ((3,), {}, "a int has no samples with numbers"),
    ):
        with pytest.raises(UsageError, match=said):
            Loader(*arguments, **options)
    loader = Loader(list(range(LENGTH - 1)))
    step = Step(owner)
    with pytest.raises(UsageError, match=r"batch of step 0: it is called in the block of the step"):
        loader.batch(step)
    with pytest.raises(UsageError, match="Samples has 30 samples, and the data set has 29"), step:
        loader.batch(step)
    loader = Loader(Items())
    with contextlib.suppress(LostError), Step(owner) as step:
        loader.batch(step)
        with pytest.raises(UsageError, match="gives the batch of a step once"):
            loader.batch(step)
        raise LostError
    loader.close()
    with pytest.raises(UsageError, match="this loader was closed"), Step(owner) as step:
        loader.batch(step)


class Large(Items):
    """Samples that no pipe takes at once; each writes down who has read it."""

    def __init__(self, readers: Path) -> None:
        self.readers = readers

    def __getitem__(self, index: int) -> Any:
        with open(self.readers, "a") as file:
            file.write(f"{os.getpid()}\n")
        return index, "x" * 100_000


def dying_early(group: ProcessGroup, readers: Path) -> None:
    """Die when a worker is full of what was read ahead."""
    state = State(samples=Samples(LENGTH, batch=4))
    loader = Loader(Large(readers), num_workers=1, prefetch_factor=4)
    with Session(state, group=group) as session:
        for step in session.steps(2):
            with step:
                loader.batch(step)
                step.commit()
        while len(readers.read_text().split()) < 4 * 6:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def test_no_worker_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    readers = tmp_path / "readers"
    with no_leaks(), processes(dying_early, 1, readers, timeout=PATIENCE) as ranks:
        ranks.join()
    (worker,) = {*map(int, readers.read_text().split())}
    end = time.monotonic() + PATIENCE
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.01)


def dying(group: ProcessGroup, deaths: list[tuple[int, str, int]]) -> Any:
    """Train with a Loader; ranks die one after another."""
    me = group.rank

    def visit(here: str, step: Step) -> None:
        if (step.number, here, me) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(group, visit, workers=1)


def test_each_sample_counts_once_while_ranks_that_read_ahead_die() -> None:
    deaths = [(2, "before backward", 0), (6, "after commit", 2), (10, "in backward", 1)]
    with no_leaks(), processes(dying, 4, deaths, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    logs = [each.value for each in outcomes if each.ok]
    assert len(logs) == 1, [each.describe() for each in outcomes]
    assert_as_undisturbed(logs)
    assert len(logs[0].events) == 3
