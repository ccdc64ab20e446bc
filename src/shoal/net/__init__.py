"""Framed, authenticated sockets with deadlines, used for every connection of shoal.

A connection starts with a handshake (``handshake.py``): both sides send a greeting of fixed size, compare
versions and purpose, and prove to each other that they hold the job's secret.  Nothing else is read before
that succeeds.  Then the connection carries frames (``connection.py``): a 4-byte little-endian length and that
number of bytes.

    with Acceptor(listen("127.0.0.1", secret=secret), secret=secret, purpose="mesh") as acceptor:
        connection = acceptor.accept(timeout=10)

    connection = connect("127.0.0.1", port, secret=secret, purpose="mesh", timeout=10)
    connection.send(b"hello", timeout=1)

With ``SHOAL_TLS=1`` TLS (``tls/stream.py``) follows the greetings, unless both sides pass ``plain=True``
because the socket will be detached.

Subclasses of :class:`Server` serve any number of clients from one thread.

Every call has one deadline in total.  Every descriptor is close-on-exec, and a forked child closes the
sockets that it inherits, so that peers detect the end of the parent at once.
"""

from ..common.deadline import Deadline
from .acceptor import MAX_PENDING, Acceptor
from .addresses import format_address, parse_address
from .client_connection import ClientConnection
from .connection import Connection
from .frames import FrameReader, frame_header
from .handshake import HANDSHAKE_TIMEOUT_S, build_version
from .peers import PeerConnection, PeerTransport, receive_hello, resource_error, send_hello
from .server import Server, raise_descriptor_limit
from .sockets import connect, connect_unix, listen, listen_unix
from .stream import ByteStream, close_in_forked_child
from .unix import peer_pid, recv_fds, send_fds

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "MAX_PENDING",
    "Acceptor",
    "ByteStream",
    "ClientConnection",
    "Connection",
    "Deadline",
    "FrameReader",
    "PeerConnection",
    "PeerTransport",
    "Server",
    "build_version",
    "close_in_forked_child",
    "connect",
    "connect_unix",
    "format_address",
    "frame_header",
    "listen",
    "listen_unix",
    "parse_address",
    "peer_pid",
    "raise_descriptor_limit",
    "receive_hello",
    "recv_fds",
    "resource_error",
    "send_fds",
    "send_hello",
]
