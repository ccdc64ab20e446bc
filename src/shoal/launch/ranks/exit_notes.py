"""Notes of the launcher in the job's store for its ranks: ended ranks, and the wanted number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import StoreError, WireError
from ...rendezvous import note_exit, note_wanted
from ...store import Store

#: seconds without notes after an error of the store, so as not to block the launcher's loop again
_RETRY_DELAY_S = 10.0


class ExitNotifier:
    """Notes in the store of an epoch of ``job``; ``connect`` opens the store for the first note."""

    def __init__(self, connect: Callable[[], Store], job: str, epoch: int = 0) -> None:
        self._connect = connect
        self._job, self._epoch = job, epoch
        self._store: Store | None = None
        self._paused_until = 0.0

    def ended(self, rank: int, how: str) -> None:
        """Note that ``rank`` has ended, and how, for ranks that wait for it."""
        self._note(lambda store: note_exit(store, rank, how, job=self._job, epoch=self._epoch))

    def wanted(self, size: int) -> None:
        """Note the wanted number of ranks; further processes are spares."""
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
            self._paused_until = time.monotonic() + _RETRY_DELAY_S
