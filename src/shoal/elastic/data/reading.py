"""The part of a loader that runs in its workers: reading the samples of one step.

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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info


class Wanted(NamedTuple):
    """A request for the samples of one rank in one step.

    Attributes:
        serial: serial number of the request, ascending.
        seed: seed of the random generators while the samples are read.
        indices: indices of the samples.
    """

    serial: int
    seed: int
    indices: list[int]


class ReadBatch(NamedTuple):
    """The response to a :class:`Wanted`.

    Attributes:
        serial: serial number of the request.
        data: the collated samples; None if the request was dropped or failed.
        error: the exception of a failed request.
    """

    serial: int
    data: Any
    error: ExceptionWrapper | None


class BatchReader(torch.utils.data.Dataset[ReadBatch]):
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
    """Return ``batch``: the ``collate_fn`` for items that are batches."""
    return batch


def _where() -> str:
    info = get_worker_info()
    return "while reading" if info is None else f"in worker {info.id} of a Loader"


def _begin_random(seed: int) -> None:
    """Seed all generators, so that a step draws the same numbers in any worker."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _end_with_the_rank() -> None:
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
