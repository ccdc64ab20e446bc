"""What is encrypted, between whom, and what a cut or a misunderstanding looks like."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import AuthenticationError, ConfigurationError, UsageError, VersionMismatch, WireError
from shoal.net import (
    Acceptor,
    Connection,
    Deadline,
    connect,
    connect_unix,
    frame_header,
    listen,
    listen_unix,
)
from shoal.net.stream import SocketStream
from shoal.net.tls.certificates import tls_config
from shoal.net.tls.stream import TlsStream
from shoal.testing import no_leaks
from tests.support.waiting import until

from .accepting import accept
from .echo import SECRET, EchoServer, connect_echo, echoes
from .relay import Relay

#: enough for any of these on a busy machine, and far less than the timeouts given
AT_ONCE = 20.0


@pytest.fixture(autouse=True)
def _encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_TLS", "1")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", secret=SECRET) as sock:
        yield sock


@pytest.fixture
def call() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _connect(port: int, secret: bytes = SECRET, **options: Any) -> Connection:
    return connect("127.0.0.1", port, **{"secret": secret, "purpose": "test", "timeout": 60, **options})


def _accept(listener: socket.socket, **options: Any) -> Connection:
    return accept(listener, **{"secret": SECRET, "purpose": "test", "timeout": 60, **options})


@pytest.fixture
def pair(
    listener: socket.socket, call: Callable[..., Future[Any]]
) -> Iterator[tuple[Connection, Connection]]:
    accepting = call(_accept, listener)
    with _connect(_port(listener)) as left, accepting.result(60) as right:
        left.limit = right.limit = 2**26
        yield left, right


def test_both_sides_speak_tls_1_3_and_know_one_certificate(pair: tuple[Connection, Connection]) -> None:
    streams = [connection._stream for connection in pair]
    for each in streams:
        assert isinstance(each, TlsStream)
        assert each._tls is not None
        assert each._tls.version() == "TLSv1.3"
    assert len(streams[0].certificate) == 32  # type: ignore[attr-defined]
    assert streams[0].certificate == streams[1].certificate  # type: ignore[attr-defined]


def test_nothing_of_a_message_or_the_secret_can_be_read_on_the_way() -> None:
    message = b"what nobody else may read " * 100
    with EchoServer() as server, Relay(server.port) as relay:
        with connect_echo(relay.port) as client:
            client.send(message, 30)
            assert client.recv(30) == message
        assert len(relay.read) > 2 * len(message)
        assert b"nobody else" not in relay.read
        assert SECRET not in relay.read


def test_without_tls_the_same_relay_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TLS", "0")
    with EchoServer() as server, Relay(server.port) as relay, connect_echo(relay.port) as client:
        client.send(b"what others may read", 30)
        assert client.recv(30) == b"what others may read"
        assert b"others may read" in relay.read


@pytest.mark.parametrize("secret", [SECRET, b"wrong"])
def test_who_ends_tls_in_between_is_refused_by_both_sides(secret: bytes) -> None:
    with EchoServer() as server, Relay(server.port, terminates=True) as relay:
        with pytest.raises(AuthenticationError, match=r"refused the secret.*there is a man in the middle"):
            connect_echo(relay.port, secret)
        assert relay.terminated == 1  # TLS alone has not helped
        assert server.accepted == 0
        echoes(server.port)


def test_a_relay_that_says_that_neither_side_encrypts_is_found_out() -> None:
    """The place of the flag is the byte before the 32 random ones."""
    with EchoServer() as server:
        with (
            Relay(server.port, change=lambda greeting: greeting[:-33] + b"\0" + greeting[-32:]) as relay,
            pytest.raises(VersionMismatch),
        ):
            connect_echo(relay.port)
        assert server.accepted == 0


def test_a_relay_that_switches_encryption_on_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TLS", "0")
    with EchoServer() as server:
        with (
            Relay(server.port, change=lambda greeting: greeting[:-33] + b"\1" + greeting[-32:]) as relay,
            pytest.raises(VersionMismatch),
        ):
            connect_echo(relay.port)
        assert server.accepted == 0


_PLAIN, _TLS = "does not encrypt them", "encrypts its connections"


@pytest.mark.parametrize("client", ["0", "1"])
@pytest.mark.parametrize("accepting", ["accept", "acceptor", "server"])
def test_plain_meets_tls_and_both_sides_hear_it_at_once(
    client: str,
    accepting: str,
    listener: socket.socket,
    call: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, theirs = (_TLS, _PLAIN) if client == "1" else (_PLAIN, _TLS)
    begun = time.monotonic()
    caplog.set_level("INFO")
    monkeypatch.setenv("SHOAL_TLS", str(1 - int(client)))
    wanted = rf"this process {mine}.*the other side {theirs}.*set SHOAL_TLS=1 for every process"
    there = rf"this process {theirs}.*the other side {mine}.*set SHOAL_TLS=1 for every process"
    if accepting == "server":
        with EchoServer() as server:
            monkeypatch.setenv("SHOAL_TLS", client)
            with pytest.raises(VersionMismatch, match=wanted):
                connect_echo(server.port)
            until(lambda: f"this process {theirs}" in caplog.text)
    elif accepting == "acceptor":
        with Acceptor(listener, secret=SECRET, purpose="test") as acceptor:
            waiting = call(acceptor.accept, 60)
            monkeypatch.setenv("SHOAL_TLS", client)
            with pytest.raises(VersionMismatch, match=wanted):
                _connect(_port(listener))
            until(lambda: f"this process {theirs}" in acceptor.refused)
            acceptor.stop()
            with pytest.raises(WireError):
                waiting.result(60)
    else:
        # The listener accepts in a process that has the other setting.
        code = (
            "import socket, sys; from tests.net.accepting import accept\n"
            f"listener = socket.socket(fileno={listener.fileno()})\n"
            f"accept(listener, secret={SECRET!r}, purpose='test', timeout=60)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, pass_fds=[listener.fileno()]
        ) as other:
            monkeypatch.setenv("SHOAL_TLS", client)
            with pytest.raises(VersionMismatch, match=wanted):
                _connect(_port(listener))
            _, err = other.communicate(timeout=60)
        assert "VersionMismatch" in err
        assert all(part in err for part in there.split(".*"))
    assert time.monotonic() - begun < AT_ONCE


def test_an_encrypted_connection_is_not_handed_over(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    with pytest.raises(WireError, match="an encrypted connection cannot be detached"):
        left.detach()
    left.send(b"still here", 30)
    assert right.recv(30) == b"still here"


def test_connections_that_will_be_handed_over_stay_plain(
    listener: socket.socket, call: Callable[..., Future[Any]]
) -> None:
    accepting = call(_accept, listener, plain=True)
    left, right = _connect(_port(listener), plain=True), accepting.result(60)
    with socket.socket(fileno=left.detach()) as one, socket.socket(fileno=right.detach()) as other:
        one.setblocking(True)
        other.setblocking(True)
        one.sendall(b"plain")
        assert other.recv(5, socket.MSG_WAITALL) == b"plain"


def test_unix_sockets_stay_plain(call: Callable[..., Future[Any]]) -> None:
    name = f"shoal-test-tls-{os.getpid()}"
    with listen_unix(name) as listener:
        accepting = call(_accept, listener)
        with connect_unix(name, secret=SECRET, purpose="test", timeout=60) as left:
            assert not isinstance(left._stream, TlsStream)
            accepting.result(60).close()


def test_an_orderly_end_is_told_from_a_cut(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.send(b"last words", 30)
    left.close()
    assert right.recv(30) == b"last words"
    with pytest.raises(WireError, match="closed the connection") as raised:
        right.recv(30)
    assert isinstance(raised.value.__cause__, ConnectionResetError)


def test_nothing_is_ever_sent_in_the_clear_once_tls_has_begun(pair: tuple[Connection, Connection]) -> None:
    """Not by a stream that was closed, and not by one whose handshake is not over."""

    left, _ = pair
    one, other = socket.socketpair()
    with one, other:
        tls = left._stream
        assert isinstance(tls, TlsStream)
        tls._below.close()
        below = SocketStream(one)
        below.close = lambda: None
        tls._below = below
        tls.close()
        fresh = tls_config(connecting=True).stream(below)
        assert fresh.send(b"greeting") == 8
        assert not fresh.encrypt()
        for stream in (tls, fresh):
            with pytest.raises(OSError, match="closed, or its TLS handshake"):
                stream.send(b"in the clear")
            with pytest.raises(OSError, match="closed, or its TLS handshake"):
                stream.recv_into(memoryview(bytearray(10)))
        assert b"in the clear" not in other.recv(2**16)


@pytest.mark.parametrize("part", [b"", frame_header(100) + b"only this"])
def test_a_cut_is_told_from_an_orderly_end(pair: tuple[Connection, Connection], part: bytes) -> None:
    left, right = pair
    left.send(b"last words", 30)
    left.write(part, Deadline(30))
    left.socket.shutdown(socket.SHUT_RDWR)  # as whoever is on the way can do
    assert right.recv(30) == b"last words"
    with pytest.raises(WireError, match=r"the connection was cut: it did not end as TLS ends"):
        right.recv(30)


@pytest.mark.parametrize("noise", [bytes(1000), b"\x17\x03\x03\xff\xff" + bytes(2**17), os.urandom(5000)])
def test_bytes_that_somebody_puts_in_end_the_connection(
    pair: tuple[Connection, Connection], noise: bytes
) -> None:
    left, right = pair
    left.send(b"true", 30)
    left.socket.setblocking(True)
    left.socket.sendall(noise)
    assert right.recv(30) == b"true"
    with pytest.raises(WireError, match=r"received data is not valid TLS|was cut"):
        right.recv(30)


def test_a_record_that_was_changed_on_the_way_is_never_given_out(
    listener: socket.socket, call: Callable[..., Future[Any]]
) -> None:
    accepting = call(_accept, listener)
    left = _connect(_port(listener))
    with left, accepting.result(60) as right:
        tls = left._stream
        assert isinstance(tls, TlsStream)
        assert tls._tls is not None
        tls._tls.write(frame_header(5) + b"hello")
        record = bytearray(tls._outgoing.read())
        record[-20] ^= 1
        left.socket.setblocking(True)
        left.socket.sendall(record)
        with pytest.raises(WireError, match="received data is not valid TLS"):
            right.recv(30)


def test_64_megabytes_come_whole_in_both_directions_at_once(
    pair: tuple[Connection, Connection], call: Callable[..., Future[Any]]
) -> None:
    one, other = (os.urandom(2**20) * 64 for _ in range(2))
    left, right = pair
    sending = [call(left.send, one, 60), call(right.send, other, 60)]
    receiving = call(right.recv, 60)
    assert left.recv(60) == other
    assert receiving.result(60) == one
    for each in sending:
        each.result(60)


@pytest.mark.concurrency
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.stress) for s in range(3, 30))]
)
def test_threads_send_and_receive_at_once_with_pauses(
    seed: int, pair: tuple[Connection, Connection], call: Callable[..., Future[Any]]
) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def messages(name: int) -> Iterator[bytes]:
        chance = random.Random(f"{seed}/{name}")
        for _ in range(150):
            yield chance.randbytes(chance.choice([0, 1, 100, 2**14, 2**16 + 1, 300_000]))

    def pause(chance: random.Random) -> None:
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 0.003))

    def send(connection: Connection, name: int) -> None:
        chance = random.Random()
        for message in messages(name):
            connection.send(message, 60)
            pause(chance)

    def receive(connection: Connection, name: int) -> None:
        chance = random.Random()
        for message in messages(name):
            assert connection.recv(60) == message
            pause(chance)

    try:
        left, right = pair
        working = [
            call(send, left, 0), call(receive, right, 0), call(send, right, 1), call(receive, left, 1)
        ]  # fmt: skip
        for each in working:
            each.result(120)
    finally:
        sys.setswitchinterval(before)


def test_a_child_that_was_forked_says_nothing_for_its_parent(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.send(b"before", 30)
    child = os.fork()
    if child == 0:
        left.close()
        os._exit(0 if left.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    left.send(b"after", 30)
    assert right.recv(30) == b"before"
    assert right.recv(30) == b"after"
    right.send(b"and back", 30)
    assert left.recv(30) == b"and back"


def test_ctrl_c_ends_a_wait_and_the_connection_is_as_good_as_before(
    pair: tuple[Connection, Connection],
) -> None:
    left, right = pair

    def interrupt(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        # Again and again: one that comes just before Python sleeps is seen only afterwards.
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            left.recv(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < AT_ONCE
    right.send(b"later", 30)
    assert left.recv(30) == b"later"


def test_no_key_is_in_a_file_or_outlives_its_making(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    real = os.memfd_create

    def noted(name: str, flags: int) -> int:
        opened.append(name)
        assert flags & os.MFD_CLOEXEC
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", noted)
    with no_leaks(), EchoServer() as server:
        echoes(server.port)
        assert opened == ["shoal-tls"] * 2
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        assert not [kind for kind in held if "shoal-tls" in kind]
    assert not list(tmp_path.iterdir())


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_each_server_has_a_key_of_its_own() -> None:
    with EchoServer() as one, EchoServer() as other:
        seen = set()
        for port in (one.port, other.port, one.port):
            with connect_echo(port) as client:
                assert isinstance(client._stream, TlsStream)
                seen.add(client._stream.certificate)
        assert len(seen) == 2


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(
        ConfigurationError, match=r"needs the package cryptography.*pip install 'shoal\[tls\]'"
    ):
        EchoServer()


def test_a_client_needs_no_such_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with EchoServer() as server:
        monkeypatch.setitem(sys.modules, "cryptography", None)
        echoes(server.port)


def test_who_does_not_encrypt_does_not_import_what_it_takes() -> None:
    code = (
        "import sys, shoal, shoal.net, shoal.store, shoal.launch.commands.run\n"
        "from shoal.store import TCPStore, TCPStoreServer\n"
        "with TCPStoreServer(secret=b'x') as server, TCPStore('127.0.0.1', server.port, b'x') as store:\n"
        "    store.set('key', b'')\n"
        "print({'ssl', 'cryptography', 'shoal.net.tls.stream'} & {*sys.modules})"
    )
    environ = {**os.environ, "SHOAL_TLS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "set()\n"


def test_a_setting_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TLS", "yes")
    with pytest.raises(UsageError, match=r"SHOAL_TLS='yes': expected 0 or 1"):
        EchoServer()
