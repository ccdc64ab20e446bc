"""The data loader of a session, whose workers read the batches of later steps ahead.

A step may be repeated, and the group may change its size.  So the loader requests the samples of the steps
that follow if no rank is lost, and compares its requests with the samples that each step takes.

A worker reads for the rank that started it, and ends with it.  It has no access to the group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ..common.copy_refusal import refuses_copies
from ..errors import UsageError
from .samples import Samples, SampleShare, seed_of
from .step import Step


class BatchRequest(NamedTuple):
    """A request for the samples of one rank in one step; ``seed``: of the generators while they are read."""

    serial: int
    seed: int
    indices: list[int]


class BatchResponse(NamedTuple):
    """The response to a :class:`BatchRequest`; ``data``: None if it was dropped or failed."""

    serial: int
    data: Any
    error: ExceptionWrapper | None


class BatchReader(torch.utils.data.Dataset[BatchResponse]):
    """A data set whose items are batches of ``dataset``; ``init`` is the user's ``worker_init_fn``."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], init: Callable[[int], None] | None
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._init = init
        # Only the rank writes it, with a single store; a lock would stay locked if the rank were killed.
        self._oldest = torch.zeros((), dtype=torch.int64, device="cpu")
        self._oldest.share_memory_()  # type: ignore[no-untyped-call]

    def drop_before(self, serial: int) -> None:
        """Make all workers skip requests before ``serial``, including one that they are reading."""
        self._oldest.fill_(serial)

    def begin(self, worker: int) -> None:
        """Initialise a worker; runs once in each worker before it reads."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self.dataset)  # frozen; programs expect their data set in it
        _exit_with_rank()
        if self._init is not None:
            self._init(worker)

    def __getitem__(self, request: BatchRequest) -> BatchResponse:
        try:
            if get_worker_info() is not None:
                _seed_generators(request.seed)
            samples = self._read(request)
            data = None if samples is None else self._collate(samples)
        except Exception:
            error = ExceptionWrapper(where=_where())  # type: ignore[no-untyped-call]
            return BatchResponse(request.serial, None, error)
        return BatchResponse(request.serial, data, None)

    def _read(self, request: BatchRequest) -> list[Any] | None:
        if request.serial < self._oldest.item():
            return None
        if getattr(self.dataset, "__getitems__", None) is not None:
            together: list[Any] = self.dataset.__getitems__(request.indices)
            return together
        samples = []
        for index in request.indices:
            if request.serial < self._oldest.item():
                return None
            samples.append(self.dataset[index])
        return samples


def unchanged(batch: Any) -> Any:
    """Return ``batch``: the ``collate_fn`` for items that are batches."""
    return batch


def _where() -> str:
    info = get_worker_info()
    return "while reading" if info is None else f"in worker {info.id} of a Loader"


def _seed_generators(seed: int) -> None:
    """Seed all generators, so that a step draws the same numbers in any worker."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _exit_with_rank() -> None:
    """End this process when the rank ends, even if it is killed.

    torch checks every 5 s whether the rank is alive, but not while a worker waits to pass on a large batch.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    assert rank.pid is not None
    try:
        handle = os.pidfd_open(rank.pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_end, args=(handle,), name="shoal-rank", daemon=True).start()


def _wait_and_end(handle: int) -> None:
    with contextlib.suppress(OSError):
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os._exit(1)


_UNSUPPORTED_OPTIONS = {
    "batch_size": "Samples has it: Samples(batch=...) for all ranks together, or Samples(per_rank=...)",
    "shuffle": "Samples has a permutation for each pass",
    "sampler": "Samples determines the samples of each step, so that each is used once per pass",
    "batch_sampler": "Samples determines the samples of each step, so that each is used once per pass",
    "drop_last": "batches are always full: the last one of a pass is filled from the next pass",
    "in_order": "steps take their batches in order",
    "persistent_workers": "workers run until the loader is closed",
}


@refuses_copies("a Loader", "worker processes", "Make another Loader of the same data set")
class Loader:
    """The batches of a session's steps, read ahead by workers.

        loader = elastic.Loader(dataset, num_workers=2)
        with elastic.Session(state) as session:
            ...
            for step in session.steps(until=10_000):
                with step:
                    x, y = loader.batch(step)

    It works as a :class:`torch.utils.data.DataLoader` that receives ``step.indices`` in each step.  When a
    step is repeated or the group changes, batches of other steps are dropped, and the workers are kept.  They
    start with the first batch, and end when the loader is closed or released, or when this process ends.

    In each step the workers seed the generators of torch, Python and NumPy from the seed of the samples, the
    number of the step, and the rank.

    Args:
        dataset: has ``dataset[index]``, or ``__getitems__`` for a list of indices; no ``IterableDataset``.
        num_workers: number of worker processes; with 0 :meth:`batch` reads, and nothing is read ahead.
        collate_fn: makes a batch of a list of samples; None: ``torch.utils.data.default_collate``.
        worker_init_fn: runs once in each worker.
        options: other options of ``DataLoader``, such as ``prefetch_factor`` and ``pin_memory``, except those
            that ``Samples`` determines.

    Raises:
        UsageError: an option or the data set cannot be used here; the message says why.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            if name in _UNSUPPORTED_OPTIONS:
                raise UsageError(f"Loader: leave {name}= out: {_UNSUPPORTED_OPTIONS[name]}")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"Loader: a {type(dataset).__name__} has no samples with numbers, which ranks could share; "
                "pass a data set with __getitem__"
            )
        self._dataset = dataset
        reader = BatchReader(dataset, collate_fn or default_collate, worker_init_fn)
        # A separate generator: starting workers draws a number, which would change those of the first step.
        options.setdefault("generator", torch.Generator().manual_seed(0))
        self._sampler = _RequestSampler()
        self._batches: DataLoader[BatchResponse] | None = DataLoader(
            reader,
            batch_size=None,
            sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=unchanged,
            worker_init_fn=reader.begin,
            persistent_workers=num_workers > 0,
            **options,
        )
        self._reader: BatchReader | None = reader
        self._reading: Iterator[BatchResponse] | None = None
        self._last: Step | None = None

    def batch(self, step: Step) -> Any:
        """Return the samples of this rank in ``step``, collated.

        Args:
            step: the step whose block is running.  Call this once per step, before its commit.

        Raises:
            UsageError: called elsewhere, or twice in a step; or the data set has fewer samples than
                ``Samples``.
            RuntimeError: a worker has died, or the ``timeout`` in ``options`` has expired.
            Exception: any exception of the data set.
        """
        self._check(step)
        assert self._batches is not None
        assert self._reader is not None
        self._last = step
        self._sampler.set_step(step)
        self._reader.drop_before(self._sampler.current_serial)
        if self._reading is None:
            self._reading = iter(self._batches)
        batch = next(self._reading)
        while batch.serial < self._sampler.current_serial:
            batch = next(self._reading)
        if batch.error is not None:
            batch.error.reraise()
        return batch.data

    def close(self) -> None:
        """End the workers; they also end when the loader is released or this process ends."""
        if self._reader is not None:
            self._reader.drop_before(self._sampler.serial)
        self._reading = self._batches = self._reader = self._last = None

    def _check(self, step: Step) -> None:
        where = f"Loader.batch of step {step.number}"
        if self._batches is None:
            raise UsageError(f"{where}: this loader was closed")
        if not step.running:
            raise UsageError(f"{where}: it is called in the block of the step, before commit()")
        if step is self._last:
            raise UsageError(f"{where}: it gives the batch of a step once; keep it in a variable")
        if hasattr(self._dataset, "__len__") and len(self._dataset) < step.samples.length:
            raise UsageError(
                f"{where}: Samples has {step.samples.length} samples, and the data set has "
                f"{len(self._dataset)}"
            )


class _RequestSampler:
    """The sampler of the DataLoader: an infinite iterator over requests for the expected steps.

    It holds no reference to the loader, so that the loader is released with its last reference.

    Attributes:
        current_serial: of the request for the current step; earlier ones are dropped.
        serial: serial number of the next request.
    """

    def __init__(self) -> None:
        self.current_serial, self.serial = -1, 0
        self._ordered: deque[tuple[int, int, torch.Tensor]] = deque()
        self._present: tuple[int, SampleShare, Samples] | None = None
        self._next = 0

    def set_step(self, step: Step) -> None:
        """Make ``step`` the current step; its batch may already have been requested."""
        self._present = step.number, step.share, step.samples
        while self._ordered:
            serial, number, indices = self._ordered.popleft()
            if serial > self.current_serial and number == step.number and torch.equal(indices, step.indices):
                self.current_serial = serial
                return
        self.current_serial, self._next = self.serial, step.number

    def __iter__(self) -> Iterator[BatchRequest]:
        while True:
            yield self._next_request()

    def _next_request(self) -> BatchRequest:
        """Return the request for the next expected step.

        It is computed from the current position of the samples: the DataLoader calls this before the commit.
        """
        assert self._present is not None
        present, share, samples = self._present
        number = self._next
        indices = samples.share(share.rank, share.size, after=number - present).indices
        self._ordered.append((self.serial, number, indices))
        seed = seed_of(samples.seed, "batch", number, share.rank)
        request = BatchRequest(self.serial, seed, indices.tolist())
        self._next += 1
        self.serial += 1
        return request
