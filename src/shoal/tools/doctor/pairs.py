"""The connections between hosts: a server that answers with its clock, and the measurements of a client."""

from __future__ import annotations

import contextlib
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ...common.formatting import encodable, format_seconds
from ...errors import ShoalError, WireError, WireTimeout
from ...net import MAX_PENDING, Acceptor, Connection, connect, format_address, listen

#: seconds for a connection and its handshake at the offered address, and at another one
_CONNECT_TIMEOUT_S, _OTHER_TIMEOUT_S = 5.0, 2.0
#: addresses that are tried beside the offered one
MAX_OTHERS = 3
#: seconds for an answer
_ANSWER_TIMEOUT_S = 5.0
#: number of exchanges of which the median is the round trip, and the fastest gives the clock offset
_EXCHANGES = 50
#: maximum seconds to exchange messages with all hosts, and with one of many
_ALL_TIMEOUT_S, _EACH_TIMEOUT_S = 10.0, 0.1
#: connections that are made at once
_MAX_THREADS = 128
#: beginning of a failure: the address belongs to another host
ANOTHER_HOST = "another host answers"
_PURPOSE = "doctor"
_IDLE_TIMEOUT_S = 600.0
#: token of the server, and its time in ns
_ANSWER = struct.Struct("<Qq")


def time_limit(size: int) -> float:
    """Return the seconds in which every one of ``size`` hosts has its measurements."""
    connects = (_CONNECT_TIMEOUT_S + MAX_OTHERS * _OTHER_TIMEOUT_S) * -(-size // _MAX_THREADS)
    return connects + _ALL_TIMEOUT_S + _EACH_TIMEOUT_S * size


class HostRecord(msgspec.Struct):
    """A host, as it describes itself in the store.

    Attributes:
        name: for messages; several hosts may have the same one.
        machine: identity of the machine and network namespace.
        address, port: that it offers.
        others: further addresses at which the port may be reached.
        token: number by which its server identifies itself.
        shoal, torch, python: versions.
    """

    name: str
    machine: str
    address: str
    port: int
    others: list[str]
    token: int
    shoal: str
    torch: str
    python: str


class Measurement(msgspec.Struct):
    """The connection of one host to another.

    Attributes:
        address: that was tried, with the port.
        failure: why there is no connection; "" if there is one.
        alternative: another address of that host that does work; "": none.
        round_trip_us: median of the exchanges, with the time of Python at both ends.
        clock_offset_us: the other host's clock minus this one's.
        clock_error_us: maximum error of the offset: half of the fastest round trip.
    """

    address: str
    failure: str = ""
    alternative: str = ""
    round_trip_us: float = 0.0
    clock_offset_us: float = 0.0
    clock_error_us: float = 0.0


class ClockServer:
    """Answers other hosts with this host's clock, in threads; a context manager.

    Args:
        host: address to listen on.
        secret: of the job.
        size: number of hosts.
        token: for the answers.
    """

    def __init__(self, host: str, secret: bytes, size: int, token: int) -> None:
        listener = listen(host, secret=secret)
        self.port: int = listener.getsockname()[1]
        self._token = token
        self._acceptor = Acceptor(
            listener, secret=secret, purpose=_PURPOSE, plain=True, most_pending=max(MAX_PENDING, size)
        )
        self._connections: list[Connection] = []
        self._thread = threading.Thread(target=self._accept, name="doctor accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(WireError):  # stopped
            while True:
                with contextlib.suppress(TimeoutError):
                    connection = self._acceptor.accept(_IDLE_TIMEOUT_S)
                    self._connections.append(connection)
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(WireError):
            while True:
                connection.recv(_IDLE_TIMEOUT_S)
                connection.send(_ANSWER.pack(self._token, time.time_ns()), _ANSWER_TIMEOUT_S)

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.stop()
        self._thread.join()
        self._acceptor.close()
        for connection in self._connections:
            connection.shutdown()


def measure_all(hosts: Sequence[HostRecord], secret: bytes) -> list[Measurement]:
    """Connect to all ``hosts`` at once, then measure one after another."""
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        tried = list(pool.map(lambda host: _connect(host, secret), hosts))
    return [
        outcome if isinstance(outcome, Measurement) else _measure(outcome, host)
        for outcome, host in zip(tried, hosts, strict=True)
    ]


def _connect(host: HostRecord, secret: bytes) -> Connection | Measurement:
    """Connect to the address that ``host`` offers; if that fails, find out whether another one works."""
    result = Measurement(format_address(host.address, host.port))
    for address in (host.address, *host.others[:MAX_OTHERS]):
        timeout = _OTHER_TIMEOUT_S if result.failure else _CONNECT_TIMEOUT_S
        try:
            connection = connect(
                address, host.port, secret=secret, purpose=_PURPOSE, timeout=timeout, plain=True
            )
            _exchange(connection, host.token)
        except (ShoalError, OSError) as error:
            result.failure = result.failure or _reason(error)
            continue
        if not result.failure:
            return connection
        connection.close()
        result.alternative = address
        break
    return result


def _reason(error: Exception) -> str:
    """The reason of a failed connection, without its address."""
    if isinstance(error, WireTimeout):
        return f"no answer within {format_seconds(_CONNECT_TIMEOUT_S)}"
    cause = error.__cause__
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else encodable(str(error))


def _exchange(connection: Connection, token: int) -> tuple[float, float]:
    """Ask for the time once; return the round trip and the clock offset in seconds.

    Raises WireError if another server answers, or none.
    """
    try:
        sent, begin = time.time_ns(), time.perf_counter()
        connection.send(b"", _ANSWER_TIMEOUT_S)
        answer = connection.recv(_ANSWER_TIMEOUT_S)
        round_trip = time.perf_counter() - begin
        if len(answer) != _ANSWER.size or _ANSWER.unpack(answer)[0] != token:
            raise WireError(f"{ANOTHER_HOST} at {connection.peer}")
    except WireError:
        connection.close()
        raise
    return round_trip, (_ANSWER.unpack(answer)[1] - sent) / 1e9 - round_trip / 2


def _measure(connection: Connection, host: HostRecord) -> Measurement:
    result = Measurement(format_address(host.address, host.port))
    try:
        with connection:
            exchanges = [_exchange(connection, host.token) for _ in range(_EXCHANGES)]
    except WireError as error:
        result.failure = str(error)
        return result
    fastest, offset = min(exchanges)
    result.round_trip_us = round(statistics.median(each for each, _ in exchanges) * 1e6, 1)
    result.clock_offset_us = round(offset * 1e6, 1)
    result.clock_error_us = round(fastest / 2 * 1e6, 1)
    return result
