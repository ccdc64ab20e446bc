"""The store of a job of ``shoal run`` (the launcher hosts it, or ``--store`` names it), and notes in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from ... import config
from ...errors import LaunchError, StoreError, UsageError, WireError
from ...net import Deadline
from ...rendezvous import (
    LOOPBACK,
    Request,
    job_keys,
    job_record,
    loopback_error,
    open_venue,
    parse_url,
    report_exit,
    set_wanted_size,
)
from ...rendezvous.launcher_variables import tcp_url
from ...store import Store, TCPStore, TCPStoreServer
from ...store.urls import EXTERNAL_SCHEMES
from ..ranks.environment import Job

#: maximum time in seconds that the launcher's loop waits for the store
_STORE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class JobStore:
    """The store of a job.

    Attributes:
        url: the value of ``SHOAL_STORE`` for the ranks.
        connect: returns a connection for the launcher; its calls take at most one second.
        server: the server in this process; None: ``--store`` names a store.
    """

    url: str
    connect: Callable[[], Store]
    server: TCPStoreServer | None = None

    def url_at(self, address: str) -> str:
        """The value of ``SHOAL_STORE`` on a host that reaches this machine at ``address``."""
        return self.url if self.server is None else tcp_url(address, self.server.port)

    def start(self) -> None:
        """Start serving.  Called after all ranks were forked, as it may start threads."""
        if self.server is not None:
            self.server.start()


def job_store(
    url: str | None, job: Job, addresses: Collection[str] = (LOOPBACK,)
) -> AbstractContextManager[JobStore]:
    """The store of ``job``: the one at ``url``, or a server in this process, at ``addresses``."""
    if url is not None:
        return _named(url, job)
    if len(set(addresses)) == 1:
        return _served(job, next(iter(addresses)))
    return _served(job, "::" if any(":" in each for each in addresses) else "0.0.0.0")


@contextmanager
def _served(job: Job, host: str) -> Iterator[JobStore]:
    if host == LOOPBACK and (trouble := loopback_error()):
        raise LaunchError(trouble)
    secret = job.secret.encode()
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with closing(
        TCPStoreServer(host, secret=secret, records=job_record(job.size, job.ident, job.epoch))
    ) as server:
        connect = partial(TCPStore, local, server.port, secret, timeout=_STORE_TIMEOUT_S)
        yield JobStore(server.url, connect, server)


@contextmanager
def _named(url: str, job: Job) -> Iterator[JobStore]:
    parts = parse_url(url)
    if parts.scheme == "env":
        raise UsageError(
            "--store must name a store, not env://, which reads variables that the launcher sets"
        )
    deadline = Deadline(config.TIMEOUT.get())
    venue = open_venue(Request(parts, None, job.size, config.secret(), deadline, job=job.ident, serves=False))
    store = venue.store
    try:
        store.multi_set(*zip(*job_record(job.size, job.ident, job.epoch).items(), strict=True))
        yield JobStore(url, partial(store.clone, _STORE_TIMEOUT_S))
    finally:
        # The job id is used only once: no other process will remove its keys.
        with suppress(StoreError, WireError):
            store.timeout = _STORE_TIMEOUT_S
            job_keys(store, job.ident, job.epoch).delete_prefix("")
        store.close()
        venue.close()


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
        self._note(lambda store: report_exit(store, rank, how, job=self._job, epoch=self._epoch))

    def wanted(self, size: int) -> None:
        """Note the wanted number of ranks; further processes are spares."""
        self._note(lambda store: set_wanted_size(store, size, job=self._job, epoch=self._epoch))

    def close(self) -> None:
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


def demand_tls(store: str | None) -> None:
    """Set ``SHOAL_TLS=1`` for this process and its children.

    Raises UsageError if TLS of the given store, a URL, is requested by another scheme.
    """
    scheme = "" if store is None else store.partition("://")[0]
    if f"{scheme}s" in EXTERNAL_SCHEMES:
        raise UsageError(f"--tls does not encrypt a {scheme}:// store: use {scheme}s:// in its URL")
    os.environ[config.TLS.name] = "1"
