"""What the launcher notes in the job's store for its ranks: who has ended, and how many are wanted."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import StoreError, WireError
from ...rendezvous import note_exit, note_wanted
from ...store import Store

#: seconds without notes after one that the store did not take: the launcher's loop has other things to do
_PAUSE = 10.0


class Notes:
    """Notes in the store of an epoch of ``job``, which ``connect`` opens for the first of them."""

    def __init__(self, connect: Callable[[], Store], job: str, epoch: int = 0) -> None:
        self._connect = connect
        self._job, self._epoch = job, epoch
        self._store: Store | None = None
        self._paused_until = 0.0

    def ended(self, rank: int, how: str) -> None:
        """Note that ``rank`` has ended, and how: ranks that wait for it hear of it."""
        self._note(lambda store: note_exit(store, rank, how, job=self._job, epoch=self._epoch))

    def wanted(self, size: int) -> None:
        """Note how many ranks are wanted: others are spares."""
        self._note(lambda store: note_wanted(store, size, job=self._job, epoch=self._epoch))

    def close(self) -> None:
        """Disconnect."""
        if self._store is not None:
            self._store.close()

    def _note(self, note: Callable[[Store], None]) -> None:
        if time.monotonic() < self._paused_until:
            return
        try:
            if self._store is None:
                self._store = self._connect()
            note(self._store)
        except (StoreError, WireError):
            self._paused_until = time.monotonic() + _PAUSE
