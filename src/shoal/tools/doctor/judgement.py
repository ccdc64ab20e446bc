"""The findings of ``shoal doctor --hosts`` from the measurements of all hosts."""

from __future__ import annotations

import errno
import itertools
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...common.formatting import counted, format_duration, printable
from ...rendezvous.addresses import is_loopback
from ..findings import Finding, fail, ok, warn
from .pairs import ANOTHER_HOST, HostRecord, Measurement

#: round trip from which the network is slow, and factor of the median from which a pair is
_SLOW_US, _SLOW_FACTOR, _LEAST_SLOW_US = 10_000.0, 10.0, 1_000.0
#: offset from which lines of several hosts' logs cannot be ordered
_CLOCK_OFFSET_US = 100_000.0
#: pairs that are named in a finding, and findings about pairs
_MAX_NAMED, _MAX_FINDINGS = 3, 20

Pairs = Mapping[tuple[int, int], Measurement]


def labels(hosts: Mapping[int, HostRecord]) -> dict[int, str]:
    """The names of the hosts, with their numbers where several have the same name."""
    names = [each.name for each in hosts.values()]
    return {
        number: printable(each.name) + (f"[{number}]" if names.count(each.name) > 1 else "")
        for number, each in hosts.items()
    }


def judge(hosts: Mapping[int, HostRecord], pairs: Pairs) -> list[Finding]:
    """Return the findings about ``hosts`` and the measured pairs of them."""
    names = labels(hosts)
    return [
        *_versions(hosts, names),
        *_machines(hosts, names),
        *_unconnected(hosts, names, pairs),
        *_round_trips(names, pairs),
        *_clocks(names, pairs),
    ]


def _versions(hosts: Mapping[int, HostRecord], names: Mapping[int, str]) -> Iterator[Finding]:
    for what, differ in (("shoal", fail), ("torch", warn), ("python", warn)):
        found: dict[str, list[str]] = {}
        for number, host in hosts.items():
            found.setdefault(getattr(host, what), []).append(names[number])
        if len(found) > 1:
            listed = "; ".join(f"{version} on {_named(which)}" for version, which in found.items())
            name = what.replace("python", "Python")
            yield differ(
                f"versions of {name} differ: {listed}", f"install the same version of {name} on all hosts"
            )


def _machines(hosts: Mapping[int, HostRecord], names: Mapping[int, str]) -> Iterator[Finding]:
    """Several processes on one machine, and loopback addresses although there are several machines."""
    machines: dict[str, list[int]] = {}
    for number, host in hosts.items():
        machines.setdefault(host.machine, []).append(number)
    if doubled := [names[each] for numbers in machines.values() if len(numbers) > 1 for each in numbers]:
        yield warn(
            f"several of these processes run on one machine: {_named(doubled)}",
            "start one process on each host (srun --ntasks-per-node=1)",
        )
    for number, host in hosts.items():
        if len(machines) > 1 and is_loopback(host.address):
            instead = (
                f"SHOAL_INTERFACE={host.others[0]}" if host.others else "SHOAL_INTERFACE to an address of it"
            )
            yield fail(
                f"{names[number]} offers the loopback address {host.address}, which no other host can reach",
                f"set {instead} on {names[number]}, and name the store by an address that is not loopback",
            )


def _unconnected(
    hosts: Mapping[int, HostRecord], names: Mapping[int, str], pairs: Pairs
) -> Iterator[Finding]:
    measured = sorted({(min(pair), max(pair)) for pair in pairs})
    failed = [
        (one, other) for one, other in measured
        if any((each := pairs.get(pair)) and each.failure for pair in ((one, other), (other, one)))
    ]  # fmt: skip
    for one, other in failed[:_MAX_FINDINGS]:
        directions = [
            _direction(names, pairs[pair], *pair) for pair in ((one, other), (other, one)) if pair in pairs
        ]
        yield fail("; ".join(directions), _remedy(hosts, names, pairs, one, other))
    if len(failed) > _MAX_FINDINGS:
        yield fail(
            f"{len(failed) - _MAX_FINDINGS} more pairs of hosts cannot connect",
            "use --json to list all of them",
        )
    if measured:
        connected = len(measured) - len(failed)
        fact = f"{connected} of {counted(len(measured), 'pair')} of hosts connected in both directions"
        yield ok(fact)


def _direction(names: Mapping[int, str], result: Measurement, one: int, other: int) -> str:
    if not result.failure:
        return f"{names[one]} connects to {names[other]} at {result.address}"
    also = f" (but {result.alternative} works)" if result.alternative else ""
    reason = printable(result.failure)
    return f"{names[one]} cannot connect to {names[other]} at {result.address}: {reason}{also}"


def _remedy(
    hosts: Mapping[int, HostRecord], names: Mapping[int, str], pairs: Pairs, one: int, other: int
) -> str:
    for a, b in ((one, other), (other, one)):
        if (result := pairs.get((a, b))) and result.alternative:
            return f"set SHOAL_INTERFACE={result.alternative} on {names[b]}"
    for each in (one, other):
        if is_loopback(hosts[each].address) and hosts[one].machine != hosts[other].machine:
            return f"set SHOAL_INTERFACE on {names[each]} to one that {names[one + other - each]} can reach"
    failures = [result.failure for a, b in ((one, other), (other, one)) if (result := pairs.get((a, b)))]
    if any(each.startswith(ANOTHER_HOST) for each in failures):
        return "give each host an address of its own; the one that was tried belongs to another host"
    ended = ""
    if os.strerror(errno.ECONNREFUSED) in failures:
        ended = "find out whether both processes still ran; if they did, "
    return (
        f"{ended}let firewalls, security groups and NetworkPolicies accept TCP between them on ports "
        f"{_port_range()}, or set SHOAL_INTERFACE on both to addresses of a network that connects them"
    )


def _port_range() -> str:
    """The ports from which the kernel chooses those of listeners."""
    try:
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return "32768-60999"


def _round_trips(names: Mapping[int, str], pairs: Pairs) -> Iterator[Finding]:
    times = {pair: each.round_trip_us for pair, each in pairs.items() if not each.failure}
    if not times:
        return
    median = statistics.median(times.values())
    limit = min(_SLOW_US, max(_LEAST_SLOW_US, _SLOW_FACTOR * median))
    fact = f"round trips take {_us(min(times.values()))} to {_us(max(times.values()))} (median {_us(median)})"
    if slow := sorted((pair for pair, each in times.items() if each > limit), key=lambda pair: -times[pair]):
        listed = _named([f"{names[a]} to {names[b]} {_us(times[a, b])}" for a, b in slow])
        yield warn(
            f"{fact}; slow: {listed}",
            "find out whether these hosts are busy, far apart, or on a slower network; each step of a "
            "collective takes a round trip",
        )
    else:
        yield ok(fact)


def _clocks(names: Mapping[int, str], pairs: Pairs) -> Iterator[Finding]:
    offsets = {pair: each for pair, each in pairs.items() if not each.failure}
    if not offsets:
        return
    (one, other), most = max(offsets.items(), key=lambda item: abs(item[1].clock_offset_us))
    ahead, behind = (other, one) if most.clock_offset_us > 0 else (one, other)
    fact = (
        f"clocks differ by at most {_us(abs(most.clock_offset_us))} (error {_us(most.clock_error_us)}): "
        f"{names[ahead]} is ahead of {names[behind]}"
    )
    if abs(most.clock_offset_us) > _CLOCK_OFFSET_US + most.clock_error_us:
        yield warn(
            fact, "synchronise the clocks (NTP, chrony), to compare times in the output of several hosts"
        )
    else:
        yield ok(fact)


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(itertools.islice(listed, _MAX_NAMED)) + more


def _us(microseconds: float) -> str:
    return format_duration(round(microseconds) / 1e6)
