"""Checks of the network: this host's name and interfaces, and the address that its ranks offer to others."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from ... import config
from ...errors import ConfigurationError, ShoalError, UsageError
from ...rendezvous import LOOPBACK, loopback_error
from ...rendezvous.addresses import address_on_route_to, is_loopback, resolve
from ...rendezvous.point import configured_interface
from ...rendezvous.schemes import means_loopback
from ...store.external.url import split_url
from ..findings import Finding, fail, ok, warn
from . import settings

#: seconds for a connection over loopback
_LOOPBACK_TIMEOUT_S = 2.0
#: beginnings of names of interfaces that only containers or virtual machines of this host reach
_INTERNAL = ("docker", "br-", "virbr", "cni", "veth", "podman", "lxc", "flannel", "cali")


def addresses() -> dict[str, str]:
    """The numeric addresses of this host's interfaces that are up, with the names of the interfaces.

    Empty if they cannot be listed.
    """
    try:
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        listed = psutil.net_if_addrs()
    except (OSError, psutil.Error):
        return {}
    return {
        each.address: name
        for name, found in listed.items()
        for each in found
        if name in up and each.family in (socket.AF_INET, socket.AF_INET6)
    }


def candidates() -> list[str]:
    """Addresses of this host that other hosts may reach, the most likely one first."""
    found = [
        address for address in addresses()
        if not (is_loopback(address) or is_link_local(address))
    ]  # fmt: skip
    usual = address_on_route_to(LOOPBACK)
    internal = {address for address, name in addresses().items() if name.startswith(_INTERNAL)}
    return sorted(found, key=lambda each: (each != usual, each in internal, ":" in each))


def is_link_local(address: str) -> bool:
    """Whether the numeric ``address`` is valid only on one link."""
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


def other_interface() -> str:
    """Advice to choose another interface, with an address if there is one."""
    others = [address for address in candidates() if not addresses()[address].startswith(_INTERNAL)]
    if others:
        return f"set SHOAL_INTERFACE={others[0]}, the address of {addresses()[others[0]]}"
    return "give this host an address that the other hosts can reach (this one has none besides loopback)"


def interfaces() -> Finding:
    """All interfaces with addresses."""
    found = [f"{name} {address}" for address, name in addresses().items() if not is_link_local(address)]
    if not found:
        return warn("no interface with an address was found", "bring one up: ip link set lo up")
    return ok(", ".join(found))


def loopback() -> Finding:
    """Whether processes of this host can reach each other over loopback."""
    trouble = loopback_error()
    if not trouble:
        try:
            with socket.create_server((LOOPBACK, 0)) as server:
                socket.create_connection(server.getsockname(), _LOOPBACK_TIMEOUT_S).close()
            return ok("loopback works")
        except OSError as error:
            trouble = f"processes of this host cannot connect over loopback: {error}"
    return fail(
        trouble.partition(";")[0],
        "bring the interface up (ip link set lo up), and let a firewall accept connections over it",
    )


def host_name() -> Finding:
    """The host's own name, which MASTER_ADDR, MPI and Gloo often use."""
    name = socket.gethostname()
    try:
        found = resolve(name, 0)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return warn(
            f"the name of this host, {name!r}, cannot be resolved ({reason}): Gloo and MPI need "
            "it, shoal does not",
            f"add a line with an address and {name} to /etc/hosts",
        )
    listed = ", ".join(found)
    if is_loopback(found[0]):
        usual = next(iter(candidates()), "this host's address")
        return warn(
            f"the name of this host, {name!r}, is a loopback address here ({listed}, mostly by /etc/hosts): "
            "shoal corrects that, Gloo and MPI do not",
            f"map {name} to {usual} in /etc/hosts, or give others {usual} instead of the name",
        )
    return ok(f"the name of this host, {name!r}, is {listed}")


def store() -> Finding:
    """The host in the URL where the ranks meet."""
    url = _store_url()
    if url is None:
        return ok("no store is set: ranks of one host meet in a private file, or `shoal run` hosts a store")
    try:
        host = split_url("store", url).hostname
    except (UsageError, ValueError) as error:
        return fail(str(error), "set SHOAL_STORE to a URL such as tcp://10.0.0.1:29400")
    if not host:
        return ok("the store's URL names no host")
    try:
        found = resolve(host, 0)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = "correct the name in SHOAL_STORE or MASTER_ADDR, or use the address"
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            advice = "create a headless Service with publishNotReadyAddresses: true as the pods' subdomain"
        return fail(f"the store's host {host!r} cannot be resolved: {reason}", advice)
    fact = f"the store's host {host!r} is {', '.join(found)}"
    if not (is_loopback(found[0]) and settings.has_several_hosts()):
        return ok(fact)
    if means_loopback(host):
        return fail(
            f"{fact}, but the job has several hosts", "name the store by an address that all can reach"
        )
    if host.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return ok(f"{fact} here, on this host itself: ranks use {address_on_route_to(found[0])} instead")
    return warn(
        f"{fact} here, so this host takes itself for the store's",
        f"remove the line of {host} from /etc/hosts, unless it is a name of this host",
    )


def offered_address() -> Finding:
    """The address that ranks on this host offer to those on other hosts."""
    several = settings.has_several_hosts()
    try:
        configured = configured_interface(os.environ)
    except ConfigurationError as error:
        return fail(str(error), other_interface())
    address = configured or address_on_route_to(_store_address())
    source = (
        "SHOAL_INTERFACE" if configured else "on the route to the store" if _store_host() else "default route"
    )
    name = addresses().get(address, "an unknown interface")
    fact = f"ranks here offer {address} ({name}, {source}) to other hosts"
    if is_loopback(address):
        fact = f"ranks here offer the loopback address {address} ({source}), which no other host can reach"
        if several:
            return fail(fact, other_interface())
        if configured or candidates():
            return warn(fact, f"for a job on several hosts, {other_interface()}")
        return ok(f"{fact}: this host has no other address")
    if is_link_local(address):
        return warn(f"{fact}, a link-local address that only hosts on the same link reach", other_interface())
    if name.startswith(_INTERNAL):
        return warn(
            f"{fact}, an interface for containers or virtual machines of this host", other_interface()
        )
    others = [each for each in candidates() if each != address]
    return ok(fact + f"; SHOAL_INTERFACE can select {' or '.join(others)}" * bool(others))


def _store_url() -> str | None:
    launch = settings.launch()
    return (launch.url if launch else None) or config.STORE.get(os.environ)


def _store_host() -> str | None:
    url = _store_url()
    try:
        return split_url("store", url).hostname if url else None
    except (ShoalError, ValueError):
        return None


def _store_address() -> str:
    host = _store_host()
    try:
        return resolve(host, 0)[0] if host else LOOPBACK
    except (OSError, UnicodeError):
        return LOOPBACK
