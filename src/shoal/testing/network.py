"""Simulated hosts on one machine, with a network that a test can partition.

    with Network("a", "b", "c") as network, processes(fn, 6, hosts="aabbcc", network=network) as ranks:
        ranks.store.wait(["ready"])
        network.drop("a", "b")           # and both still reach c

Each host is a Linux network namespace, connected by a veth pair to a router namespace whose packet filter
implements the cuts. The namespaces are anonymous and not connected to the machine's network. Descriptors of
this process and the processes inside keep them alive, so the kernel removes them with the last of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import UsageError

#: name of the host of the store, part of every network
STORE = "store"
#: one host or several: "ab" means hosts a and b, unless a host has that name
Hosts: TypeAlias = str | Iterable[str]

_CLONE_NEWNET = 0x40000000
MAX_HOSTS = 200
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_TABLE = "inet shoal"
_EMPTY = f"""
add table {_TABLE}
add chain {_TABLE} cuts {{ type filter hook forward priority 0; }}
flush chain {_TABLE} cuts
"""


def why_unavailable() -> str:
    """Describe why this process cannot create a :class:`Network`; empty if it can."""
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program, path=_PATH) is None:
            return f"the program {program!r} was not found; on Debian, apt install {package}"
    try:
        Network("a").close()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces need root and kernel support: {said.strip()}"
    return ""


class Network:
    """Simulated hosts on this machine for the ranks of a test.

    All hosts reach one another and the host of the store until the test cuts them off. As in a real network
    failure, cut connections stay open and no process is notified.

    Args:
        hosts: names of the hosts.

    Raises:
        UsageError: a name occurs twice, or is that of the store.
        OSError, CalledProcessError: this machine does not support it; see :func:`why_unavailable`.
    """

    def __init__(self, *hosts: str) -> None:
        self._numbers = {name: number for number, name in enumerate([STORE, *hosts])}
        if not 1 < len(self._numbers) == len(hosts) + 1 <= MAX_HOSTS:
            raise UsageError(
                f"Network{hosts!r}: expected 1 to {MAX_HOSTS - 1} unique names other than {STORE!r}"
            )
        self.hosts = hosts
        with contextlib.ExitStack() as steps:
            self._router = _new_namespace(steps)
            self._places = {name: _new_namespace(steps) for name in self._numbers}
            self._connect()
            self._descriptors = steps.pop_all()

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return _address(self._numbers[host], 2)

    def inside(self, host: str) -> contextlib.AbstractContextManager[None]:
        """Context in which this thread, and the processes that it starts, are on ``host``."""
        return _in_namespace(self._places[host])

    def entrance(self, host: str) -> str:
        """Return a path for :func:`enter`, valid while this process runs."""
        return _path(self._places[host])

    # -- cuts ----------------------------------------------------------------------------------

    def drop(self, some: Hosts, others: Hosts) -> None:
        """Drop all packets between ``some`` and ``others``, in both directions."""
        self._filter(some, others, "drop")

    def drop_one_way(self, some: Hosts, others: Hosts) -> None:
        """Drop all packets from ``some`` to ``others``."""
        self._filter(some, others, "drop", one_way=True)

    def reset(self, some: Hosts, others: Hosts) -> None:
        """Answer packets between ``some`` and ``others`` with a TCP reset, like a firewall."""
        self._filter(some, others, "meta l4proto tcp reject with tcp reset")

    def down(self, hosts: Hosts) -> None:
        """Switch off the network devices of these hosts, so that they cannot even send."""
        for name in self._checked(hosts):
            _run(self._places[name], "ip", "link set dev eth0 down\n")

    def heal(self) -> None:
        """Undo all cuts. Lost packets are retransmitted on connections that are still open."""
        _run(self._router, "nft", _EMPTY)
        for name, number in self._numbers.items():
            _run(self._places[name], "ip", _up(number))

    # -- rates and delays ----------------------------------------------------------------------

    def shape(self, *, megabits: float | None = None, delay_us: float = 0.0) -> None:
        """Limit what each host sends, and delay it, by the kernel's traffic control.

        New connections of the hosts use TCP's congestion control *reno*, which every kernel has, so that
        results do not depend on the default of this machine.

        Args:
            megabits: rate in Mbit/s; None: no limit.
            delay_us: time in microseconds that each packet waits; needs a kernel with ``netem``.

        Raises:
            UsageError: the kernel has no such traffic control.
        """
        if delay_us > 0:
            rate = "" if megabits is None else f" rate {megabits:g}mbit"
            discipline = f"netem limit 100000 delay {delay_us:g}us{rate}"
        elif megabits is not None:
            # The bytes of one tick of a kernel with 250 Hz, but not less than the largest packet: the kernel
            # would cut it into many, for which the queues of its virtual devices are too short.
            burst = max(int(megabits * 1e6 / 8 / 250), 128 << 10)
            discipline = f"tbf rate {megabits:g}mbit burst {burst} limit {16 << 20}"
        else:
            discipline = "pfifo"
        for name in self.hosts:
            with _in_namespace(self._places[name]):
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
            try:
                _run(self._places[name], "tc", f"qdisc replace dev eth0 root {discipline}\n")
            except subprocess.CalledProcessError as error:
                text = f"shape(): tc qdisc {discipline}: {error.stderr.strip()}"
                raise UsageError(f"{text}; the kernel may lack this traffic control") from None

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the hosts; the kernel removes them with their last process."""
        self._descriptors.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- implementation ------------------------------------------------------------------------

    def _connect(self) -> None:
        cables, routes = [], []
        for name, number in self._numbers.items():
            place = _path(self._places[name])
            cables.append(f"link add {_device(number)} type veth peer name eth0 netns {place}")
            routes.append(f"addr add {_address(number, 1)}/24 dev {_device(number)}")
            routes.append(f"link set dev {_device(number)} up")
        _run(self._router, "ip", "\n".join([*cables, *routes]))
        for name, number in self._numbers.items():
            script = f"link set dev lo up\naddr add {_address(number, 2)}/24 dev eth0\n" + _up(number)
            _run(self._places[name], "ip", script)
        _run(self._router, "nft", _EMPTY)
        with _in_namespace(self._router):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _checked(self, hosts: Hosts) -> list[str]:
        names = [hosts] if isinstance(hosts, str) and hosts in self._numbers else list(hosts)
        if not names or not self._numbers.keys() >= set(names):
            raise UsageError(f"{names!r}: the hosts of this network are {', '.join(self._numbers)}")
        return names

    def _filter(self, some: Hosts, others: Hosts, what: str, *, one_way: bool = False) -> None:
        """Add the rules for all pairs of hosts, atomically."""
        pairs = list(itertools.product(self._checked(some), self._checked(others)))
        if not one_way:
            pairs += [(b, a) for a, b in pairs]
        script = "\n".join(
            f"add rule {_TABLE} cuts iifname {_device(self._numbers[a])} "
            f"oifname {_device(self._numbers[b])} {what}"
            for a, b in pairs
        )
        _run(self._router, "nft", script + "\n")


def enter(entrance: str, prepare: Callable[[], Any] | None = None) -> None:
    """Move this thread, and the processes that it starts, to the host of a :meth:`Network.entrance`.

    Args:
        prepare: called there.
    """
    place = os.open(entrance, os.O_RDONLY)
    try:
        _enter_namespace(place)
    finally:
        os.close(place)
    if prepare is not None:
        prepare()


def _address(number: int, last: int) -> str:
    return f"10.213.{number}.{last}"


def _device(number: int) -> str:
    return f"host{number}"


def _up(number: int) -> str:
    """Commands that switch a host's device on and restore its route, which was lost with the device."""
    return f"link set dev eth0 up\nroute replace default via {_address(number, 1)}\n"


def _path(place: int) -> str:
    return f"/proc/{os.getpid()}/fd/{place}"


def _new_namespace(steps: contextlib.ExitStack) -> int:
    """Create a namespace; return its descriptor, which ``steps`` closes."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _checked_call("unshare", _CLONE_NEWNET)
        try:
            place = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            _enter_namespace(home)
    finally:
        os.close(home)
    steps.callback(os.close, place)
    return place


@contextlib.contextmanager
def _in_namespace(place: int) -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _enter_namespace(place)
        try:
            yield
        finally:
            _enter_namespace(home)
    finally:
        os.close(home)


def _enter_namespace(place: int) -> None:
    _checked_call("setns", place, _CLONE_NEWNET)


def _checked_call(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


#: arguments by which these programs read commands from stdin
_READING = {"ip": ("-batch", "-"), "tc": ("-batch", "-"), "nft": ("-f", "-")}


def _run(place: int, program: str, commands: str) -> None:
    with _in_namespace(place):
        subprocess.run(
            [shutil.which(program, path=_PATH) or program, *_READING[program]],
            input=commands, text=True, capture_output=True, check=True,
        )  # fmt: skip
