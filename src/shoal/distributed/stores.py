"""shoal's stores with the constructors and method names of torch's stores.

They are accepted wherever shoal takes a store.  The queues of torch's stores are not supported.
"""

from __future__ import annotations

from typing import TypeAlias

from .. import store as stores
from ..errors import UsageError
from ..rendezvous import default_secret
from ..rendezvous.addresses import resolve
from ..torch_terms.arguments import Duration, default_pg_timeout, seconds

Store: TypeAlias = stores.Store

#: The keys on which a TCPStore waits for its workers.
_ARRIVED, _COMPLETE = "shoal/workers", "shoal/workers/complete"


class _TorchNames(stores.Store):
    """Torch's names of the methods of every store."""

    def set_timeout(self, timeout: Duration) -> None:
        """Set the default timeout of every call."""
        self.timeout = seconds(timeout) or 0.0

    def delete_key(self, key: str) -> bool:
        """Remove ``key`` and return whether it existed."""
        return self.delete(key)

    def has_extended_api(self) -> bool:
        """True: ``append``, ``multi_get`` and ``multi_set`` are supported."""
        return True


class TorchTCPStore(_TorchNames, stores.TCPStore):
    """A client of a store on the network; the master also serves the store.

    Args:
        host_name, port: the master's address; port 0 on the master selects a free port.
        world_size: number of processes that will connect; None: unknown.
        is_master: whether this process serves the store, until :meth:`close`.
        timeout: limit of connecting, and of every call.
        wait_for_workers: whether to block until ``world_size`` processes have connected.
        multi_tenant, use_libuv: not used.
        master_listen_fd: must be None.

    The job's secret is ``SHOAL_SECRET``; without it the store is restricted to loopback and one user.
    """

    _server: stores.TCPStoreServer | None = None  # None in a clone

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Duration = default_pg_timeout,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if master_listen_fd is not None:
            raise UsageError(
                f"TCPStore: master_listen_fd={master_listen_fd!r}: the store opens its own socket"
            )
        secret = default_secret(host_name)
        if is_master:
            address = resolve(host_name, port)[0]
            self._server = stores.TCPStoreServer(address, port, secret).start()
            host_name, port = self._server.host, self._server.port
        try:
            super().__init__(host_name, port, secret, timeout=seconds(timeout))
        except BaseException:
            self._close_server()
            raise
        if world_size is not None and world_size > 0 and wait_for_workers:
            try:
                self._wait_for(world_size)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connections and, on the master, stop the server."""
        super().close()
        self._close_server()

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()

    def _wait_for(self, world_size: int) -> None:
        if self.add(_ARRIVED, 1) >= world_size:
            self.set(_COMPLETE, b"")
        self.wait([_COMPLETE])


class TorchFileStore(_TorchNames, stores.FileStore):
    """A store in a file, which is never removed.

    Args:
        file_name: the file.
        world_size: not used.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__(file_name)


class HashStore(_TorchNames, stores.MemoryStore):
    """A store in memory, for the threads of this process."""

    def __init__(self) -> None:
        super().__init__()


class TorchPrefixStore(_TorchNames, stores.PrefixStore):
    """A view of another store in which every key has a prefix."""

    @property
    def underlying_store(self) -> stores.Store:
        """The wrapped store."""
        return self.store
