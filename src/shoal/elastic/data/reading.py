"""The half of a loader that runs in its workers: reading the samples of one step.

A worker reads for the rank that started it, and ends with it.  It has no part in the group: a child of a fork
inherits none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info


class Wanted(NamedTuple):
    """The samples of one rank in one step.

    Attributes:
        serial: number of this order; later ones have higher numbers.
        seed: for the random numbers that a worker draws while it reads them.
        indices: of the samples.
    """

    serial: int
    seed: int
    indices: list[int]


class ReadBatch(NamedTuple):
    """What became of a :class:`Wanted`.

    Attributes:
        serial: of the order.
        data: the samples, collated; None if they were not wanted any more, or could not be read.
        error: why they could not be read.
    """

    serial: int
    data: Any
    error: ExceptionWrapper | None


class BatchReader(torch.utils.data.Dataset[ReadBatch]):
    """A data set whose items are batches.

    Args:
        dataset: of the samples.
        collate: makes a batch of a list of samples.
        init: the program's ``worker_init_fn``.

    Attributes:
        dataset: of the samples.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], init: Callable[[int], None] | None
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._init = init
        # Written by the rank alone, in one store: without a lock, which a rank that is killed would keep.
        self._oldest = torch.zeros((), dtype=torch.int64, device="cpu")
        self._oldest.share_memory_()  # type: ignore[no-untyped-call]

    def drop_before(self, serial: int) -> None:
        """Have all workers skip what was ordered before ``serial``, also in the midst of it."""
        self._oldest.fill_(serial)

    def begin(self, worker: int) -> None:
        """Run once in each worker, before it reads."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self.dataset)  # it is frozen; the program looks for its own there
        _end_with_the_rank()
        if self._init is not None:
            self._init(worker)

    def __getitem__(self, wanted: Wanted) -> ReadBatch:
        try:
            if get_worker_info() is not None:
                _begin_random(wanted.seed)
            samples = self._read(wanted)
            data = None if samples is None else self._collate(samples)
        except Exception:
            error = ExceptionWrapper(where=_where())  # type: ignore[no-untyped-call]
            return ReadBatch(wanted.serial, None, error)
        return ReadBatch(wanted.serial, data, None)

    def _read(self, wanted: Wanted) -> list[Any] | None:
        if wanted.serial < self._oldest.item():
            return None
        if getattr(self.dataset, "__getitems__", None) is not None:
            together: list[Any] = self.dataset.__getitems__(wanted.indices)
            return together
        samples = []
        for index in wanted.indices:
            if wanted.serial < self._oldest.item():
                return None
            samples.append(self.dataset[index])
        return samples


def unchanged(batch: Any) -> Any:
    """The ``collate_fn`` for items that are batches."""
    return batch


def _where() -> str:
    info = get_worker_info()
    return "while reading" if info is None else f"in worker {info.id} of a Loader"


def _begin_random(seed: int) -> None:
    """Seed whatever a data set may draw from: the same step draws the same, whichever worker reads it."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _end_with_the_rank() -> None:
    """End this process when the rank does, however that dies.

    torch looks for the rank every 5 s, and not while a worker waits to hand over a large batch that nobody
    takes any more.
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
