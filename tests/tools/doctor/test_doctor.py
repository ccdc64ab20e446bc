"""``shoal doctor`` as a command: it always ends with findings, never with a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.launch.cli import invoke
from shoal.testing import Network
from shoal.tools.doctor import command, self_test, software
from shoal.tools.doctor import network as doctor_network
from shoal.tools.findings import Finding, fail, ok, warn
from tests.support.networks import network

__all__ = ["network"]

SOURCE = str(Path(shoal.__file__).parent.parent)


def doctor(*arguments: str, path: str = SOURCE, folder: str = "/") -> tuple[int, Any, str]:
    """Run doctor with an environment that has only PYTHONPATH; the exit code, its JSON, and stderr."""
    outcome = subprocess.run(
        [sys.executable, "-m", "shoal", "doctor", "--json", *arguments],
        env={"PYTHONPATH": path}, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return outcome.returncode, json.loads(outcome.stdout), outcome.stderr


def test_all_checks_run_without_environment_home_and_writable_directory() -> None:
    code, report, err = doctor(folder="/proc")
    failed = [each for each in report["findings"] if each["status"] == "fail"]
    assert (code, failed, report["ok"], err) == (0, [], True, "")
    assert report["schema"] == "shoal.doctor/1"
    checks = {(topic, check.__name__) for topic, checks in command.CHECKS.items() for check in checks}
    assert {(each["topic"], each["check"]) for each in report["findings"]} == checks
    assert all(bool(each["advice"]) == (each["status"] != "ok") for each in report["findings"])
    tests = [each["fact"] for each in report["findings"] if each["topic"] == "self test"]
    assert [fact.partition(":")[0] for fact in tests] == [
        "two ranks over shared memory",
        "two ranks over TCP over loopback",
    ]


def test_an_old_torch_is_a_finding_although_shoal_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    for name in ("__init__", "version"):
        (tmp_path / "torch" / f"{name}.py").write_text('__version__ = "2.1.0"\n')
    code, report, err = doctor(path=os.pathsep.join([str(tmp_path), SOURCE]))
    facts = {each["check"]: each for each in report["findings"]}
    assert (code, err) == (1, "")
    assert facts["torch"]["status"] == "fail"
    assert "torch 2.1.0 is installed" in facts["torch"]["fact"]
    assert facts["core"]["status"] == "ok"
    assert facts["two_ranks"]["fact"] == "the self test was not run, because it needs torch"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise OSError('libtorch.so: wrong ELF class')", "OSError: libtorch.so: wrong ELF class"),
        ("import os; os.abort()", "the process was killed by SIGABRT."),
        ("import os; os._exit(3)", "the process exited with code 3 and without a result"),
        ("import threading; threading.Event().wait()", "no result within 2 s"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_finding(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("shoal.tools.doctor.children.TIMEOUT_S", 2.0)
    software.torch_facts.cache_clear()
    try:
        found = software.torch()
        assert not software.torch_works()
    finally:
        software.torch_facts.cache_clear()
    assert found.status == "fail"
    assert found.fact.endswith(f" cannot be imported: {reason}")


def test_a_loopback_interface_that_is_down_is_found_by_a_check_and_by_the_self_test(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "torch_works", lambda: True)
    monkeypatch.setattr(self_test, "_MEANS", {"tcp": "TCP"})
    monkeypatch.setattr(self_test, "_RANK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(doctor_network, "_LOOPBACK_TIMEOUT_S", 0.1)
    with network.inside("a"):
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        (found,) = self_test.two_ranks()
        cause = doctor_network.loopback()
    assert cause.status == "fail"
    assert cause.advice.startswith("bring the interface up (ip link set lo up)")
    assert found.status == "fail"
    assert re.match("two ranks over TCP: (rank 0|on both): RendezvousTimeout: rendezvous: ", found.fact)


@pytest.mark.parametrize(("transport", "usual", "slow"), [("shm", 2.1, 2133.6), ("tcp", 31.5, 2133.6)])
def test_a_slow_self_test_is_a_warning_with_the_load_of_the_machine(
    transport: str, usual: float, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (7.25, 1.0, 1.0))
    found = self_test._judge(transport, [usual, usual])
    assert (found.status, found.fact.partition("takes ")[2]) == ("ok", f"{usual} us")
    found = self_test._judge(transport, [usual, slow])
    assert found.status == "warn"
    assert re.search(r"takes 2133.6 us, on an idle machine less than 10+ us; the load average", found.fact)
    assert re.search(r" 7.2, with [0-9.]+ usable cores$", found.fact)
    assert found.advice.startswith("end other programs")


def test_findings_are_printed_by_topic_and_a_check_that_raises_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise KeyError("no \udcff such key")

    def several() -> list[Finding]:
        return [ok("first\33[31m"), warn("two\nlines", "sleep")]

    monkeypatch.setattr(command, "CHECKS", {"one": [several], "two": [broken]})
    assert invoke(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "one",
        "  ok   first?[31m",
        "  warn two lines",
        "       -> sleep",
        "",
        "two",
        "  fail this check raised KeyError: 'no \\udcff such key'",
        "       -> mount /proc and /sys if they are missing; otherwise report this line as a bug",
        "",
        "1 warning, 1 failure",
    ]
    monkeypatch.setattr(command, "CHECKS", {"one": [several]})
    assert invoke(["doctor"]) == 0
    monkeypatch.setattr(command, "CHECKS", {"one": [lambda: fail("\udcff", "x")]})
    capsys.readouterr()
    assert invoke(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["fact"] == "\\udcff"


@pytest.mark.parametrize(
    ("python", "reason"), [("", "path"), ("/nowhere/python", "could be started: No such file")]
)
def test_no_check_raises_where_no_process_can_be_started(
    python: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    software.torch_facts.cache_clear()
    monkeypatch.setattr(sys, "executable", python)
    try:
        found = {each.check: each for each in command.run_checks()}
    finally:
        software.torch_facts.cache_clear()
    assert not [each for each in found.values() if "this check raised" in each.fact]
    for check in ("core", "torch"):
        assert found[check].status == "fail"
        assert reason in found[check].fact


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "tcp://h:1"], "--store is an option of --hosts"),
        (["--hosts", "2", "x.json"], "DUMP, --hosts and --job are different checks; start one of them"),
        (["--hosts", "0"], "--hosts '0': expected the number of hosts"),
        (["--hosts", "9" * 5000], "--hosts '999"),
        (["--hosts", "65537", "--store", "what://x"], "--hosts 65537: expected at most 65536 hosts"),
        (["--hosts", "2"], "--hosts: no store is known; give --store "),
        (
            ["--hosts", "2", "--store", "file:///dev/null/x"],
            "rendezvous file '/dev/null/x': there is no directory",
        ),
        (["--hosts", "2", "--store", "what://x"], "rendezvous url 'what://x': neither a handler nor a store"),
        (["--hosts", "--store", "tcp://127.0.0.1:1"], "--hosts: the number of hosts is unknown; give it"),
        (["--timeout", "0"], "Invalid value for '--timeout'"),
        (["/nowhere/at/all"], None),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["doctor", *arguments]) == (2 if message else 1)
    out, err = capsys.readouterr()
    if message is None:
        assert out.startswith("files\n  fail /nowhere/at/all: No such file or directory\n")
    else:
        assert err.startswith(f"shoal: {message}")
        assert err.count("\n") == 1
