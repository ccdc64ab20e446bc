"""``shoal doctor --hosts``: which pairs of hosts can connect, and which hosts never came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal import ConfigurationError
from shoal.launch.cli import invoke
from shoal.store import TCPStoreServer
from shoal.testing import Network
from shoal.tools.doctor import hosts as hosts_module
from shoal.tools.doctor.command import _print_json, _table
from shoal.tools.doctor.hosts import HostsReport, check_hosts
from shoal.tools.doctor.judgement import judge
from shoal.tools.doctor.pairs import HostRecord, Measurement
from tests.support.networks import network
from tests.support.ports import free_port

from .test_doctor import SOURCE

__all__ = ["network"]

SECRET = "0123456789abcdef0123456789abcdef"


def on_hosts(
    network: Network,
    hosts: str,
    size: int,
    *options: str,
    cut: Callable[[], object] = lambda: None,
    **more: Any,
) -> dict[str, tuple[int, dict[str, Any]]]:
    """Run the command on simulated hosts; exit code and JSON of each.

    Args:
        cut: called before the processes start.
        more: for a host, its additional variables.
    """
    with ExitStack() as stack:
        with network.inside("store"):
            server = TCPStoreServer(network.address("store"), secret=SECRET.encode()).start()
            stack.callback(server.close)
        cut()
        command = [
            sys.executable,
            "-m",
            "shoal",
            "doctor",
            "--json",
            "--hosts",
            str(size),
            "--store",
            server.url,
        ]
        running = {}
        for host in hosts:
            environ = {
                "PYTHONPATH": SOURCE,
                "SHOAL_SECRET": SECRET,
                "SHOAL_HOST_ID": host,
                **more.get(host, {}),
            }
            with network.inside(host):
                process = subprocess.Popen([*command, *options], env=environ, stdout=subprocess.PIPE)
            running[host] = stack.enter_context(process)
            stack.callback(process.kill)
        outputs = {host: process.communicate(timeout=120)[0] for host, process in running.items()}
        return {host: (process.returncode, json.loads(outputs[host])) for host, process in running.items()}


def failures(report: dict[str, Any]) -> list[str]:
    return [each["fact"] for each in report["findings"] if each["status"] == "fail"]


def test_a_pair_that_is_cut_is_named_in_both_directions_with_its_addresses(network: Network) -> None:
    reports = on_hosts(network, "abc", 3, cut=lambda: network.drop("a", "b"))
    assert reports["a"][0] == reports["b"][0] == 1
    for host in "ab":
        (failure,) = failures(reports[host][1])
        for one, other in ("ab", "ba"):
            assert f"{one} cannot connect to {other} at {network.address(other)}:" in failure
        assert failure.count("no answer within 5 s") == 2
    # The first host, by arrival, has all pairs, the others their own.
    complete = max((report for _, report in reports.values()), key=lambda report: len(report["pairs"]))
    pairs = {(each["from"], each["to"]): each for each in complete["pairs"]}
    assert set(pairs) == {(one, other) for one in "abc" for other in "abc" if one != other}
    assert {pair for pair, each in pairs.items() if each["failure"]} == {("a", "b"), ("b", "a")}
    assert all(each["round_trip_us"] > 0 for each in pairs.values() if not each["failure"])
    # All hosts have one clock.
    assert all(abs(each["clock_offset_us"]) <= each["clock_error_us"] + 1 for each in pairs.values())
    for report in (reports["a"][1], reports["b"][1]):
        assert "c" in {each["to"] for each in report["pairs"]}


def test_a_loopback_address_and_a_host_that_does_not_come_are_named(network: Network) -> None:
    wrong = {"SHOAL_INTERFACE": "127.0.0.1"}
    reports = on_hosts(network, "abc", 4, "--timeout", "8", b=wrong, c={"SHOAL_SECRET": "another secret"})
    code, report = reports["c"]
    assert code == 1
    assert failures(report)[0].startswith("this host does not reach the store: ")
    for host in "ab":
        code, report = reports[host]
        late, loopback, pair = failures(report)
        assert code == 1
        assert late.startswith("hosts that did not come within 8 s: 2 of 4; these came: ")
        assert loopback == "b offers the loopback address 127.0.0.1, which no other host can reach"
        right = network.address("b")
        assert f"b connects to a at {network.address('a')}:" in pair
        assert "a cannot connect to b at 127.0.0.1:" in pair
        assert pair.endswith(f"(but {right} works)") or f"(but {right} works);" in pair
        (advice,) = [each["advice"] for each in report["findings"] if each["fact"] == pair]
        assert advice == f"set SHOAL_INTERFACE={right} on b"


def together(count: int, function: Callable[[int], HostsReport]) -> list[HostsReport]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, range(count)))


def test_runs_follow_each_other_at_one_store_also_after_one_that_was_not_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    with TCPStoreServer(secret=SECRET.encode()).start() as server:
        for count, size, timeout in ((3, 3, 60.0), (1, 2, 0.2), (2, 2, 60.0), (2, 2, 60.0)):
            reports = together(
                count, lambda _, size=size, timeout=timeout: check_hosts(server.url, size, timeout)
            )
            statuses = {each.status for report in reports for each in report.findings}
            assert ("fail" in statuses) == (count < size)
            assert max(len(report.pairs) for report in reports) == count * (count - 1)
        monkeypatch.setattr(hosts_module, "_MAX_READERS", 2)
        reports = together(3, lambda _: check_hosts(server.url, 3, 60.0))
        assert sorted(len(report.pairs) for report in reports) == [2, 2, 6]
        (late,) = [each.fact for each in together(1, lambda _: check_hosts(server.url, 2, 0.2))[0].findings][
            :1
        ]
        (alone,) = check_hosts(server.url, 1, 60.0).findings
        assert (alone.status, alone.fact) == ("ok", "there is one host, so no pair of hosts")
        assert late.startswith("hosts that did not come within 0.2 s: 1 of 2; these came: ")
        with pytest.raises(ConfigurationError, match="another process expects"):
            together(2, lambda each: check_hosts(server.url, 2 + each, 0.5))


def test_the_first_process_serves_the_store_and_processes_of_one_machine_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/store"):
        command = [sys.executable, "-m", "shoal", "doctor", "--hosts=2", "--store", url]
        environ = {**os.environ, "PYTHONPATH": SOURCE}
        both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [process.communicate(timeout=120)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], outputs
        assert all("several of these processes run on one machine" in each for each in outputs)
        assert all("1 of 1 pair of hosts connected in both directions" in each for each in outputs)
        assert all("round trip us" in each for each in outputs)


def test_hosts_that_slurm_names_are_named_when_they_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TCPStoreServer(secret=SECRET.encode()).start() as server:
        for name, value in {
            "SLURM_PROCID": 1, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_NUM_NODES": 3,
            "SLURM_STEP_NODELIST": "node[07-09]", "SHOAL_STORE": server.url, "SHOAL_SECRET": SECRET,
        }.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))
        assert invoke(["doctor", "--hosts", "--timeout", "0.2"]) == 1
        assert "hosts that did not come within 0.2 s: node07, node09; these came: " in capsys.readouterr().out
        assert invoke(["doctor", "--hosts", "1"]) == 2
        assert "the launcher has given this process number 1" in capsys.readouterr().err


def test_an_unreachable_store_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    url = f"tcp://192.0.2.250:{free_port()}"
    assert invoke(["doctor", "--hosts", "2", "--store", url, "--timeout", "0.2"]) == 1
    assert "fail this host does not reach the store: rendezvous: " in capsys.readouterr().out


# -- judgement ---------------------------------------------------------------------------------


def host(name: str, **fields: Any) -> HostRecord:
    values = {
        "shoal": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.2",
        "machine": name,
        "others": [],
        **fields,
    }
    return HostRecord(name=name, address="10.0.0.1", port=1, token=0, **values)


def test_versions_clocks_and_slow_pairs_are_judged() -> None:
    hosts = {0: host("a"), 1: host("b", torch="2.12.0"), 2: host("a", machine="c", shoal="0.2.0")}
    pairs = {
        (one, other): Measurement("x", round_trip_us=50.0, clock_error_us=20.0)
        for one in hosts for other in hosts if one != other
    }  # fmt: skip
    pairs[0, 1] = Measurement("x", round_trip_us=4000.0, clock_error_us=20.0)
    pairs[1, 2] = Measurement("x", round_trip_us=50.0, clock_offset_us=-2.5e6, clock_error_us=20.0)
    found = [(each.status, each.fact) for each in judge(hosts, pairs)]
    assert found == [
        ("fail", "versions of shoal differ: 0.1.0 on a[0], b; 0.2.0 on a[2]"),
        ("warn", "versions of torch differ: 2.13.0 on a[0], a[2]; 2.12.0 on b"),
        ("ok", "3 of 3 pairs of hosts connected in both directions"),
        ("warn", "round trips take 50 us to 4 ms (median 50 us); slow: a[0] to b 4 ms"),
        ("warn", "clocks differ by at most 2.5 s (error 20 us): b is ahead of a[2]"),
    ]


def test_many_failures_and_pairs_are_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = {number: host(f"h{number}") for number in range(30)}
    pairs = {
        (one, other): Measurement("x", failure="" if one else "another host answers at x", round_trip_us=one)
        for one in hosts for other in hosts if one != other
    }  # fmt: skip
    found = judge(hosts, pairs)
    assert [each.fact for each in found if "more pairs" in each.fact] == [
        "9 more pairs of hosts cannot connect"
    ]
    assert found[0].fact == "h0 cannot connect to h1 at x: another host answers at x; h1 connects to h0 at x"
    assert found[0].advice.startswith("give each host an address of its own")
    report = HostsReport(found, {number: each.name for number, each in hosts.items()}, pairs)
    table = _table(report)
    assert (table.row_count, table.title) == (60, "60 of 870 connections: the failed and the slowest ones")
    _print_json(found, report)
    assert len(json.loads(capsys.readouterr().out)["pairs"]) == 870
