"""The network addresses of this machine, and the resolution of host names."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``, IPv4 first; OSError if the name is unknown."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def loopback_error() -> str:
    """Return why processes of this machine cannot reach each other over loopback; "" if they can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))  # looks up the route, and sends nothing
        except OSError as error:
            return (
                f"the loopback interface of this machine does not work ({error.strerror}), over which its "
                "processes reach each other; bring it up: ip link set lo up"
            )
    return ""


def is_loopback(address: str) -> bool:
    """Return whether the numeric ``address`` is a loopback address."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_local_address(address: str) -> bool:
    """Return whether the numeric ``address`` belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_on_route_to(target: str) -> str:
    """Return this machine's address on the route to the numeric address ``target``; send nothing.

    For a loopback target, return the address of the default route, which other machines can reach.
    """
    if is_loopback(target):
        target = "2001:db8::1" if ":" in target else "192.0.2.1"  # for documentation: uses the default route
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
