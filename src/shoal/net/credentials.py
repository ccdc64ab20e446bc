"""Credentials of the process at the other end of a unix socket."""

from __future__ import annotations

import os
import socket
import struct

from ..errors import AuthenticationError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process id and effective user id of the process that connected or listened, as of that time.

    The process id is 0 if the process is in another pid namespace.
    """
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def refuse_other_users(sock: socket.socket) -> None:
    """Raise AuthenticationError if the other end of a unix socket belongs to another user.

    On one host a job has one user, even if users on other hosts have its secret too.
    """
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise AuthenticationError(
            f"process {pid} of user {uid} is at the other end of a unix socket: ranks on one host only "
            f"share memory with processes of the same user, {os.geteuid()}"
        )
