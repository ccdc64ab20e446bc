"""``shoal doctor --hosts``: the connections between all pairs of hosts.

One process runs on each host. They meet in the job's store, in keys beside those of the ranks::

    doctor/round                number of the current round: one run of this command
    doctor/<round>/size         number of hosts, on which all must agree
    doctor/<round>/arrivals     counter: the number of a host that the launcher gives none
    doctor/<round>/host/<n>     a host: see ``HostRecord``
    doctor/<round>/came         counter of hosts that have a number
    doctor/<round>/members      set when all have come, or at the first timeout: the hosts that take part
    doctor/<round>/result/<n>   its measurements of the connections to the members

This is not the rendezvous of ranks, which fails as a whole if a host does not come: here those that came are
checked. A process that ends opens the next round.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ... import config
from ...common import torch_release
from ...common.decoding import MalformedMessage, from_json
from ...common.formatting import counted, encodable, format_seconds, printable
from ...errors import ConfigurationError, ShoalError, StoreTimeout, UsageError
from ...net import build_version
from ...rendezvous import RendezvousPoint, open_point
from ...rendezvous.launcher_variables import read
from ...rendezvous.membership import serve_until_read
from ...rendezvous.slurm_nodelist import hosts_of
from ...store import PrefixStore
from ..findings import Finding, fail, ok
from . import network
from .judgement import judge, labels
from .pairs import MAX_OTHERS, ClockServer, HostRecord, Measurement, measure_all, time_limit

T = TypeVar("T")

_MAX_HOSTS = 2**16
#: number of hosts up to which each of them reads all results
_MAX_READERS = 64
#: maximum characters of a host's name
_MAX_NAME = 100


@dataclass
class HostsReport:
    """The findings of this process, and the measurements that it shows.

    Attributes:
        findings: about all pairs in the first host's process, about its own pairs in others.
        names: of the hosts, by number.
        pairs: (from, to) -> measurement.
    """

    findings: list[Finding]
    names: dict[int, str] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Measurement] = field(default_factory=dict)


def check_hosts(url: str | None, size: int | None, timeout: float) -> HostsReport:
    """Meet the other hosts, measure the connections to them, and return what all have found.

    Args:
        url: of the store; None: as the launcher's environment names it.
        size: number of hosts; None: set by the launcher.
        timeout: seconds to wait for the others.

    Raises:
        UsageError: neither the arguments nor the environment name store and size, or the size is too large.
    """
    launch = None
    if url is None or size is None:
        launch = read(os.environ)
    if url is None and launch is None:
        raise UsageError(
            "--hosts: no store is known; give --store tcp://FIRST-HOST:29400, set SHOAL_STORE, or start it "
            "by a launcher: shoal run --hosts h1,h2 -m shoal doctor --hosts"
        )
    expected = size or (launch and launch.size)
    if not expected:
        raise UsageError("--hosts: the number of hosts is unknown; give it: --hosts 4")
    if expected > _MAX_HOSTS:
        raise UsageError(f"--hosts {expected}: expected at most {_MAX_HOSTS} hosts")
    try:
        place = open_point(url, size=expected, timeout=timeout)
    except UsageError:
        raise
    except ShoalError as error:
        return HostsReport([fail(
            f"this host does not reach the store: {error}",
            "check the address of the store, that it runs, and that firewalls let this host connect to it",
        )])  # fmt: skip
    with place:
        try:
            report = _check(place, expected)
        except UsageError:
            raise
        except ShoalError as error:
            report = HostsReport([fail(
                f"the check of this host was interrupted: {error}", "run it again on all hosts"
            )])  # fmt: skip
        if place.venue.others_disconnected is not None:
            serve_until_read(place.venue.others_disconnected)
    return report


def _check(place: RendezvousPoint, size: int) -> HostsReport:
    address, secret, token = place.interface(), place.secret(), secrets.randbits(64)
    # On all addresses, so that the others can find out which one works if this one does not.
    with ClockServer("::" if ":" in address else "0.0.0.0", secret, size, token) as server:
        others = [
            each for each in network.candidates() if each != address and (":" in each) == (":" in address)
        ]  # fmt: skip
        me = HostRecord(
            name=encodable(config.HOST_ID.get(place.request.environ) or socket.gethostname())[:_MAX_NAME],
            machine=place.identity.machine,
            address=address,
            port=server.port,
            others=others[:MAX_OTHERS],
            token=token,
            shoal=build_version(),
            torch=torch_release.installed() or "none",
            python=platform.python_version(),
        )
        return _Meeting(place, size, me).run(secret)


class _Meeting:
    """One round of this command, as one host takes part in it."""

    def __init__(self, place: RendezvousPoint, size: int, me: HostRecord) -> None:
        self._place, self._size, self._me = place, size, me
        self._root = PrefixStore("doctor", place.store)
        self._number, self._round = self._arrive()
        self._keys = PrefixStore(str(self._round), self._root)

    def _arrive(self) -> tuple[int, int]:
        """Take a number in the current round; in the next one if that is full."""
        mine, given = msgspec.json.encode(self._me), self._place.venue.rank
        if given is not None and given >= self._size:
            raise ConfigurationError(
                f"--hosts {self._size}: the launcher has given this process number {given}, counted from 0; "
                "start one process on each host, or give the number of processes"
            )
        while True:
            current = self._root.add("round", 0)
            keys = PrefixStore(str(current), self._root)
            size = int(keys.compare_set("size", b"", str(self._size)))
            if size != self._size:
                self._end(current)
                raise ConfigurationError(
                    f"--hosts {self._size}: another process expects {counted(size, 'host')}; give all the "
                    "same number, and run it again on all hosts"
                )
            number = keys.add("arrivals", 1) - 1 if given is None else given
            if number < size and keys.compare_set(f"host/{number}", b"", mine) == mine:
                self._root.delete_prefix(f"{current - 2}/")
                return number, current
            self._end(current)

    def _end(self, number: int) -> None:
        """Open the next round, unless another process has."""
        self._root.compare_set("round", str(number), str(number + 1))

    def run(self, secret: bytes) -> HostsReport:
        try:
            hosts = self._members()
            self._place.venue.on_complete()
            missing = [number for number in range(self._size) if number not in hosts]
            problems = [self._missing(missing, hosts)] if missing else []
            if self._number not in hosts:
                return HostsReport([*problems, fail(
                    "this host came when the others had already begun without it",
                    "run it again on all hosts, with a longer --timeout",
                )])  # fmt: skip
            # Beginning after this host, so that not all measure the same one at once.
            peers = sorted(hosts.keys() - {self._number}, key=lambda each: (each < self._number, each))
            mine = measure_all([hosts[each] for each in peers], secret)
            results, silent = self._exchange(dict(zip(peers, mine, strict=True)), hosts)
        finally:
            self._end(self._round)
        names = labels(hosts)
        is_first = self._number == min(hosts)
        pairs = {
            (one, other): measurement
            for one, measurements in results.items()
            for other, measurement in measurements.items()
            if is_first or self._number in (one, other)
        }
        if self._size == 1:
            problems.append(ok("there is one host, so no pair of hosts"))
        if not is_first:
            problems.append(ok(f"these are the connections of this host; {names[min(hosts)]} prints all"))
        problems += [
            fail(f"host {names[each]} came, but reported no result", "look at its output, and run it again")
            for each in silent
        ]
        shown = hosts if is_first else {each: hosts[each] for each in {self._number, *(b for _, b in pairs)}}
        return HostsReport([*problems, *judge(shown, pairs)], names, pairs)

    def _members(self) -> dict[int, HostRecord]:
        """Wait for all hosts; return those that came before the first process stopped waiting."""
        keys = self._keys
        if keys.add("came", 1) == self._size:
            keys.compare_set("members", b"", msgspec.json.encode([*range(self._size)]))
        try:
            numbers = keys.get("members", self._place.request.deadline.remaining())
        except StoreTimeout:
            found = keys.peek([f"host/{each}" for each in range(self._size)])
            here = [number for number, each in enumerate(found) if each is not None]
            numbers = keys.compare_set("members", b"", msgspec.json.encode(here))
        members = _decoded(numbers, list[int])
        records = keys.multi_get([f"host/{each}" for each in members])
        return {number: _decoded(each, HostRecord) for number, each in zip(members, records, strict=True)}

    def _exchange(
        self, mine: dict[int, Measurement], hosts: Mapping[int, HostRecord]
    ) -> tuple[dict[int, dict[int, Measurement]], list[int]]:
        """Publish the measurements of this host; return those of all hosts, and the hosts that report none.

        Of many hosts, all but the first one return only their own: together they would read gigabytes.
        """
        self._keys.set(f"result/{self._number}", msgspec.json.encode(mine))
        names = [f"result/{each}" for each in hosts]
        with contextlib.suppress(StoreTimeout):
            self._keys.wait(names, time_limit(self._size))
        if len(hosts) > _MAX_READERS and self._number != min(hosts):
            return {self._number: mine}, []
        found = dict(zip(hosts, self._keys.peek(names), strict=True))
        silent = [number for number, each in found.items() if each is None]
        return {
            number: _decoded(each, dict[int, Measurement])
            for number, each in found.items()
            if each is not None
        }, silent

    def _missing(self, missing: list[int], hosts: Mapping[int, HostRecord]) -> Finding:
        timeout = format_seconds(self._place.request.deadline.timeout)
        came = ", ".join(labels(hosts).values())
        named = ", ".join(_expected_names(missing, self._size))
        if self._place.venue.rank is None:
            named = f"{len(missing)} of {self._size}"
        server = f" at {self._place.venue.address}" if self._place.venue.address else ""
        return fail(
            f"hosts that did not come within {timeout}: {named}; these came: {came}",
            f"start the command there too; if it runs there, let it reach the store{server}",
        )


def _expected_names(numbers: list[int], size: int) -> list[str]:
    """The names of hosts that did not come: by Slurm's list if it has one for each process."""
    try:
        names = hosts_of(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        names = []
    if len(names) != size:
        names = [f"host {number}" for number in range(size)]
    return [names[number] for number in numbers]


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return from_json(data, kind)
    except MalformedMessage as error:
        raise UsageError(f"the store has an unexpected value: {printable(str(error))}") from None
