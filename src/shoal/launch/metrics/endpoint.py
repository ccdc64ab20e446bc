"""The HTTP server of ``--metrics``, which Prometheus scrapes."""

from __future__ import annotations

import io
import logging
import re
import resource
import socketserver
import sys
import threading
import time
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any

import click

from ...errors import ConfigurationError, OutOfResources
from ...net import format_address, listen, parse_address

if TYPE_CHECKING:
    from ...store import TCPStoreServer
    from .counters import JobCounters

logger = logging.getLogger(__name__)

#: interface to listen on if the address names none
_DEFAULT_HOST = "127.0.0.1"
#: maximum number of connections at the same time, and part of the process's descriptors that they may use
_MAX_CONNECTIONS, _PART_OF_DESCRIPTORS = 16, 8
#: seconds within which a client must send its request, and read each part of the answer
_CLIENT_TIMEOUT_S = 5.0
#: seconds between two attempts to accept a connection after an error
_RETRY_DELAY_S = 0.1


def metrics_address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    """Check the value of ``--metrics``, ``[HOST]:PORT``; a callback of click."""
    if value is None:
        return None
    if not re.search(r":[0-9]+$", value):
        raise click.BadParameter(f"expected [HOST]:PORT, such as :9400 for {_DEFAULT_HOST}; got {value!r}")
    return parse_address(f"{_DEFAULT_HOST}{value}" if value.startswith(":") else value)


metrics_option = click.option(
    "--metrics",
    metavar="[HOST]:PORT",
    callback=metrics_address,
    help="Serve metrics for Prometheus at http://HOST:PORT/metrics, without a password. HOST is 127.0.0.1 by "
    "default; 0.0.0.0 or [::] is all interfaces.",
)


class MetricsEndpoint:
    """Serves metrics over HTTP, in threads between :meth:`start` and :meth:`close`.

    The constructor binds the port.

    Args:
        host, port: address to listen on; port 0: chosen by the kernel.

    Attributes:
        url: URL of the metrics.

    Raises:
        ConfigurationError: the Prometheus client is not installed.
        WireError: the address is in use, or does not belong to this host.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler
        except ImportError as error:
            raise ConfigurationError(
                f"--metrics needs the package prometheus_client: {error}; pip install 'shoal[metrics]'"
            ) from None
        self._registry = CollectorRegistry(auto_describe=True)
        handler: Any = type("_Handler", (_RequestHandler, MetricsHandler), {"registry": self._registry})
        listener = listen(host, port, public=True)
        self.url = f"http://{format_address(*listener.getsockname()[:2])}/metrics"
        self._server = _Server(listener, handler)
        self._thread: threading.Thread | None = None

    def add_ranks(self, job: str | None) -> None:
        """Serve the metrics of the ranks of this machine, of this job or of all jobs."""
        from .collectors import RankCollector

        self._registry.register(RankCollector(job))

    def add_job(self, job: str, counters: JobCounters) -> None:
        """Serve the metrics of a job of this launcher."""
        from .collectors import JobCollector

        self.add_ranks(job)
        self._registry.register(JobCollector(job, counters))

    def add_store(self, server: TCPStoreServer) -> None:
        """Serve the metrics of a store."""
        from .collectors import StoreCollector

        self._registry.register(StoreCollector(server))

    def start(self) -> bool:
        """Start the thread; False if it was started before.  Raises OutOfResources."""
        if self._thread is not None:
            return False
        thread = threading.Thread(target=self._server.run, name="shoal-metrics", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OutOfResources(
                f"cannot serve metrics: {error}.  Raise the limit of threads of the process (ulimit -u)"
            ) from error
        self._thread = thread
        return True

    def close(self) -> None:
        """Close the port, and end the thread.  May be called twice."""
        self._server.stop()
        if self._thread is not None:
            self._thread.join()
        self._server.server_close()


class _RequestHandler(socketserver.StreamRequestHandler):
    """A mixin that limits the time of a client."""

    timeout = _CLIENT_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_RequestReader(self.connection))


class _RequestReader(io.RawIOBase):
    """Reads a request.  The timeout of a socket would begin again with each part of it."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + _CLIENT_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_CLIENT_TIMEOUT_S)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server on a listening socket with few connections, so that descriptors are left.

    A new connection ends the oldest one if there are too many, so clients that send nothing cannot keep
    others out.
    """

    daemon_threads = True

    def __init__(self, listener: Any, handler: Any) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()  # the constructor makes one
        self.socket = listener
        self._stopped = threading.Event()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(1, min(_MAX_CONNECTIONS, descriptors // _PART_OF_DESCRIPTORS))
        self._lock = threading.Lock()
        #: connections, the oldest first, and those that were ended but whose threads still run
        self._open: dict[socket, None] = {}
        self._ended: set[socket] = set()
        self._failed = False

    def run(self) -> None:
        while not self._stopped.is_set():
            self.handle_request()

    def stop(self) -> None:
        """Let :meth:`run` return."""
        self._stopped.set()
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)  # wakes the thread that waits for connections

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # closed, or out of descriptors
            self._stopped.wait(_RETRY_DELAY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._open) >= self._most
            if is_full and len(self._ended) < self._most:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._ended.add(oldest)
                with suppress(OSError):
                    oldest.shutdown(SHUT_RDWR)  # wakes its thread, which closes it
                is_full = False
            if not is_full:
                self._open[request] = None
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._ended.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        disconnected = isinstance(sys.exc_info()[1], OSError)
        # Requests that the Prometheus client cannot parse end here too, and must not fill the output.
        level = logging.DEBUG if disconnected or self._failed else logging.ERROR
        self._failed = self._failed or not disconnected
        logger.log(level, "a scrape failed; later errors have the level DEBUG", exc_info=True)
