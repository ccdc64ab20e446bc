"""Hosts on one machine, with a network between them that a test cuts and heals.

    with Network("a", "b", "c") as network, processes(fn, 6, hosts="aabbcc", network=network) as ranks:
        ranks.store.wait(["ready"])
        network.drop("a", "b")           # and both still reach c

Each host is a network namespace of Linux, joined by a cable to one more namespace, the router, whose packet
filter makes the cuts.  No namespace has a name and none is joined to the machine's own network: descriptors
of this process and the processes inside hold them, so the kernel removes them with the last of these, however
they end.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

from ..errors import UsageError

#: the host of the store, which every network has
STORE = "store"
#: one host, or several: "ab" are hosts a and b, unless one is named so
Hosts: TypeAlias = str | Iterable[str]

_CLONE_NEWNET = 0x40000000
_MOST = 200
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_TABLE = "inet shoal"
_EMPTY = f"""
add table {_TABLE}
add chain {_TABLE} cuts {{ type filter hook forward priority 0; }}
flush chain {_TABLE} cuts
"""


def why_unavailable() -> str:
    """Why this process cannot make a :class:`Network`, in words; empty if it can."""
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program, path=_PATH) is None:
            return f"the program {program!r} is not there; on Debian, apt install {package}"
    try:
        Network("a").close()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces need root, and a kernel that allows them: {said.strip()}"
    return ""


class Network:
    """Several hosts on this machine, which the ranks of a test run on.

    All of them reach one another, and the host of the store, until a test cuts them off.  A cut lets
    connections stand, as a broken network does: nobody is told of it.

    Args:
        hosts: their names.

    Raises:
        UsageError: two have one name, or that of the store.
        OSError, CalledProcessError: this machine does not allow it; see :func:`why_unavailable`.
    """

    def __init__(self, *hosts: str) -> None:
        self._numbers = {name: number for number, name in enumerate([STORE, *hosts])}
        if not 1 < len(self._numbers) == len(hosts) + 1 <= _MOST:
            raise UsageError(f"Network{hosts!r}: expected 1 to {_MOST - 1} different names, none {STORE!r}")
        self.hosts = hosts
        with contextlib.ExitStack() as steps:
            self._router = _made(steps)
            self._places = {name: _made(steps) for name in self._numbers}
            self._connect()
            self._descriptors = steps.pop_all()

    def address(self, host: str) -> str:
        """The address under which the others reach a host."""
        return _address(self._numbers[host], 2)

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """What this thread opens in the block, and what it starts, is on ``host``."""
        with _inside(self._places[host]):
            yield

    def entrance(self, host: str) -> str:
        """A path by which a process that this one lives longer than may :func:`enter` ``host``."""
        return _path(self._places[host])

    # -- cuts ----------------------------------------------------------------------------------

    def drop(self, some: Hosts, others: Hosts) -> None:
        """Nothing that ``some`` and ``others`` send one another arrives."""
        pairs = self._pairs(some, others)
        self._filter(pairs + [(b, a) for a, b in pairs], "drop")

    def drop_one_way(self, some: Hosts, others: Hosts) -> None:
        """Nothing that ``some`` send to ``others`` arrives; what these send does."""
        self._filter(self._pairs(some, others), "drop")

    def reset(self, some: Hosts, others: Hosts) -> None:
        """What ``some`` and ``others`` send one another is answered with a reset of its connection, as by a
        firewall.
        """
        pairs = self._pairs(some, others)
        self._filter(pairs + [(b, a) for a, b in pairs], "meta l4proto tcp reject with tcp reset")

    def down(self, hosts: Hosts) -> None:
        """The network devices of these hosts are switched off: they cannot even send."""
        for name in self._checked(hosts):
            _run(self._places[name], "ip", "-batch", "-", script="link set dev eth0 down\n")

    def heal(self) -> None:
        """Undo all cuts.  What was sent meanwhile is sent again if its connection still stands."""
        _run(self._router, "nft", "-f", "-", script=_EMPTY)
        for name, number in self._numbers.items():
            _run(self._places[name], "ip", "-batch", "-", script=_up(number))

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the hosts: they go with their last process."""
        self._descriptors.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------

    def _connect(self) -> None:
        cables, routes = [], []
        for name, number in self._numbers.items():
            place = _path(self._places[name])
            cables.append(f"link add {_device(number)} type veth peer name eth0 netns {place}")
            routes.append(f"addr add {_address(number, 1)}/24 dev {_device(number)}")
            routes.append(f"link set dev {_device(number)} up")
        _run(self._router, "ip", "-batch", "-", script="\n".join([*cables, *routes]))
        for name, number in self._numbers.items():
            script = f"link set dev lo up\naddr add {_address(number, 2)}/24 dev eth0\n" + _up(number)
            _run(self._places[name], "ip", "-batch", "-", script=script)
        _run(self._router, "nft", "-f", "-", script=_EMPTY)
        with _inside(self._router), open("/proc/sys/net/ipv4/ip_forward", "w") as forward:
            forward.write("1")

    def _checked(self, hosts: Hosts) -> list[str]:
        names = [hosts] if isinstance(hosts, str) and hosts in self._numbers else list(hosts)
        if not names or not self._numbers.keys() >= set(names):
            raise UsageError(f"{names!r}: the hosts of this network are {', '.join(self._numbers)}")
        return names

    def _pairs(self, some: Hosts, others: Hosts) -> list[tuple[str, str]]:
        return list(itertools.product(self._checked(some), self._checked(others)))

    def _filter(self, pairs: list[tuple[str, str]], what: str) -> None:
        """Add rules, all at one moment."""
        script = "\n".join(
            f"add rule {_TABLE} cuts iifname {_device(self._numbers[a])} "
            f"oifname {_device(self._numbers[b])} {what}"
            for a, b in pairs
        )
        _run(self._router, "nft", "-f", "-", script=script + "\n")


class entering:
    """Calls ``prepare`` on the host behind an :meth:`Network.entrance`; can be pickled."""

    def __init__(self, entrance: str, prepare: Callable[[], Any] | None) -> None:
        self._entrance, self._prepare = entrance, prepare

    def __call__(self) -> None:
        enter(self._entrance)
        if self._prepare is not None:
            self._prepare()


def enter(entrance: str) -> None:
    """Move this thread, and what it starts, to the host behind an :meth:`Network.entrance`."""
    place = os.open(entrance, os.O_RDONLY)
    try:
        _set(place)
    finally:
        os.close(place)


def _address(number: int, last: int) -> str:
    return f"10.213.{number}.{last}"


def _device(number: int) -> str:
    return f"host{number}"


def _up(number: int) -> str:
    """Switch the device of a host on, which takes its route away when it is switched off."""
    return f"link set dev eth0 up\nroute replace default via {_address(number, 1)}\n"


def _path(place: int) -> str:
    return f"/proc/{os.getpid()}/fd/{place}"


def _made(steps: contextlib.ExitStack) -> int:
    """A descriptor of a new namespace, closed by ``steps``."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _checked_call("unshare", _CLONE_NEWNET)
        try:
            place = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            _set(home)
    finally:
        os.close(home)
    steps.callback(os.close, place)
    return place


@contextlib.contextmanager
def _inside(place: int) -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _set(place)
        try:
            yield
        finally:
            _set(home)
    finally:
        os.close(home)


def _set(place: int) -> None:
    _checked_call("setns", place, _CLONE_NEWNET)


def _checked_call(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _run(place: int, program: str, *args: str, script: str) -> None:
    with _inside(place):
        subprocess.run(
            [shutil.which(program, path=_PATH) or program, *args],
            input=script, text=True, capture_output=True, check=True,
        )  # fmt: skip
