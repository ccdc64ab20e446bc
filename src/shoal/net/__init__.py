"""Framed, authenticated sockets with deadlines, used for every connection of shoal.

A connection starts with a handshake (``handshake.py``): both sides send a greeting of fixed size, compare
versions and purpose, and prove to each other that they hold the job's secret.  Nothing else is read before
that succeeds.  Then the connection carries frames (``connection.py``): a 4-byte little-endian length and that
number of bytes.

    listener = listen("127.0.0.1", secret=secret)
    connection = accept(listener, secret=secret, purpose="mesh", timeout=10)

    connection = connect("127.0.0.1", port, secret=secret, purpose="mesh", timeout=10)
    connection.send(b"hello", timeout=1)

With ``SHOAL_TLS=1`` TLS (``tls/encryption.py``) follows the greetings, unless both sides pass ``plain=True``
because the socket will be detached.

Subclasses of :class:`Server` serve any number of clients from one thread.

Every call has one deadline in total.  Every descriptor is close-on-exec, and a forked child closes the
sockets that it inherits, so that peers detect the end of the parent at once.
"""

from ..common.deadline import Deadline
from .acceptor import MAX_PENDING, Acceptor
from .connection import DEFAULT_LIMIT, Connection
from .frames import FrameReader, frame_header
from .handshake import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION, Handshake, build_version
from .inherit import close_in_forked_child
from .introduce import SharedMemory, be_introduced, introduce, share_memory
from .pending import PendingHandshake
from .server import Server, raise_descriptor_limit
from .session import ClientConnection
from .sockets import accept, connect, listen, listens
from .stream import ByteStream
from .unix import connect_unix, listen_unix, peer_pid, recv_fds, send_fds

__all__ = [
    "DEFAULT_LIMIT",
    "HANDSHAKE_TIMEOUT_S",
    "MAX_PENDING",
    "PROTOCOL_VERSION",
    "Acceptor",
    "ByteStream",
    "ClientConnection",
    "Connection",
    "Deadline",
    "FrameReader",
    "Handshake",
    "PendingHandshake",
    "Server",
    "SharedMemory",
    "accept",
    "be_introduced",
    "build_version",
    "close_in_forked_child",
    "connect",
    "connect_unix",
    "frame_header",
    "introduce",
    "listen",
    "listen_unix",
    "listens",
    "peer_pid",
    "raise_descriptor_limit",
    "recv_fds",
    "send_fds",
    "share_memory",
]
