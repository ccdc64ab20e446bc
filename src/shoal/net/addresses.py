"""Addresses of hosts and ports, and the other end of a socket: its address, or its process and user."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from ..errors import AuthenticationError, UsageError, WireError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; port 0 if there is none. IPv6 addresses are in brackets."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or port.endswith("]"):
        host, port = address.strip(), "0"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"address {address!r}: put an IPv6 address in brackets, as in [::1]:29400")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"address {address!r}: expected host:port with a port up to 65535")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the addresses of ``host``, IPv4 first, so that both sides resolve localhost to 127.0.0.1."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port}: expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise WireError(f"cannot find the address of host {host!r}: {error}") from error
    addresses = [(int(family), address) for family, _, _, _, address in found]
    return sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET)


def peer_name(sock: socket.socket) -> str:
    """Return the other end of a connected socket, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "a disconnected peer"
    if isinstance(name, tuple):
        return format_address(name[0], name[1])
    if sock.family == socket.AF_UNIX:
        return f"process {peer_credentials(sock)[0]}"
    return str(name)


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
