"""Which machine a process runs on, and under which addresses the others can reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Here:
    """Where a process runs.

    Attributes:
        machine: identity of the kernel and network namespace.  Processes with equal values reach each
            other over loopback, whatever ``SHOAL_HOST_ID`` says.
        process: identity of the process, never used twice: PID namespace, PID and start time.
    """

    machine: str
    process: str


def here() -> Here:
    """Where the calling process runs."""
    start = psutil.Process().create_time()
    return Here(machine_id(), f"{_namespace('pid')}/{os.getpid()}/{start}")


@cache
def machine_id() -> str:
    """``hostname/boot id/network namespace``.

    The boot id alone would make one machine of all its containers, which cannot reach each other over
    loopback; the host name alone is "localhost" too often.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown-boot"
    return f"{socket.gethostname()}/{boot}/{_namespace('net')}"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return f"{kind}:unknown"


def process_is_gone(process: str) -> bool:
    """Whether ``process`` (of :class:`Here`, on this machine) has ended; False when unknown."""
    namespace, pid, start = process.rsplit("/", 2)
    if namespace != _namespace("pid"):
        return False
    try:
        found = psutil.Process(int(pid))
        return found.create_time() != float(start) or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def resolve(host: str, port: int) -> list[str]:
    """The addresses of ``host``, IPv4 first.

    Raises:
        OSError: the name is unknown.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def is_loopback(address: str) -> bool:
    """Whether the numeric ``address`` is a loopback address."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_mine(address: str) -> bool:
    """Whether the numeric ``address`` belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(target: str) -> str:
    """This machine's address on the route to the numeric address ``target``; sends nothing.

    For a loopback target, the address of the default route: others must reach us from outside.
    """
    if is_loopback(target):
        target = "2001:db8::1" if ":" in target else "192.0.2.1"  # documentation addresses: routed by default
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
