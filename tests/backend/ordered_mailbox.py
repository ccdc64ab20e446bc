"""The mailbox backend as one that takes operations in one order only."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from shoal_mailbox import MailboxBackend
from shoal_mailbox.channel import MailboxChannel

from shoal.backend.base import DataChannel, GroupSpec
from shoal.future import Future
from shoal.spec import Operation, OpKind

#: What every channel was given, in order: (name of the group, rank) -> operations.
seen: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)


class OrderedChannel(MailboxChannel):
    """Matches operations by their order alone, as a communicator does, and has to be connected by all."""

    ordered = True
    collective = True

    def __init__(self, store: Any, group: GroupSpec) -> None:
        super().__init__(store, group)
        self._key = (group.name, group.rank)
        self._connected = False
        self._inside = threading.Lock()

    def connect(self, timeout: float) -> None:
        barrier = Operation(OpKind.BARRIER, 0, 0, (), (), timeout, root=-1)
        super().submit(barrier).wait(timeout)
        self._connected = True

    def submit(self, operation: Operation) -> Future[Any]:
        assert self._connected
        assert self._inside.acquire(blocking=False), "two threads submit at once"
        try:
            calls = seen[self._key]
            calls.append((operation.number, operation.key))
            return super().submit(replace(operation, number=len(calls), key=0))
        finally:
            self._inside.release()

    def supports(self, kind: OpKind, dtype: Any, op: Any) -> bool:
        return dtype is not torch.int8


class OrderedBackend(MailboxBackend):
    name = "ordered"

    def channel(self, group: GroupSpec) -> DataChannel:
        return OrderedChannel(self._store, group)
