"""The process at the other end of a unix socket, as the kernel knows it."""

from __future__ import annotations

import os
import socket
import struct

from ..errors import AuthenticationError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id and effective user id of the process that connected, or listened, when it did so.

    The process id is 0 if it lives in another pid namespace.
    """
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def refuse_other_users(sock: socket.socket) -> None:
    """Raise AuthenticationError if the other end of a unix socket is another user's.

    A job has one user on a host, though it may hand its secret to several elsewhere.
    """
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise AuthenticationError(
            f"process {pid} of user {uid} is at the other end of a unix socket: ranks on one host share "
            f"memory with processes of their own user alone, {os.geteuid()}"
        )
