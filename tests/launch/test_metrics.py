"""``--metrics``: what Prometheus reads of ranks, launchers and stores."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from shoal import ProcessGroup, rank_status
from shoal.launch.cli import invoke
from shoal.launch.metrics import collectors
from shoal.launch.metrics.collectors import JobCollector, RankCollector, StoreCollector
from shoal.launch.metrics.counters import JobCounters
from shoal.launch.metrics.endpoint import _MAX_CONNECTIONS, MetricsEndpoint
from shoal.rank_sampler import RankTotals, Sampler
from shoal.rank_status import RankFinder, RankProcess
from shoal.rendezvous import user_secret
from shoal.store import TCPStoreServer, open_store
from shoal.testing import run_threads
from tests.support.chrome_traces import ChromeTrace
from tests.support.ports import free_port
from tests.support.prometheus_server import PrometheusServer, needs_prometheus
from tests.support.waiting import until

from .conftest import Workshop
from .test_hosts import far as far
from .test_respawn import PRELUDE, said

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "observability"

Values = dict[tuple[str, ...], float]


def scrape(url: str) -> Values:
    """The samples by name and labels, without the name of the job."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(text for name, text in sample.labels.items() if name != "job_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def values(collector: RankCollector) -> Values:
    return {
        (sample.name, *list(sample.labels.values())[1:]): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def refuses(url: str) -> bool:
    try:
        scrape(url)
    except (urllib.error.URLError, ConnectionError):
        return True
    return False


def only(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    """Let finders find these ranks of this process alone."""
    find = RankFinder.find

    def found(self: RankFinder) -> list[RankProcess]:
        return [each for each in find(self) if each.pid == os.getpid() and each.rank in ranks]

    monkeypatch.setattr(RankFinder, "find", found)


def test_counters_of_ranks_never_decrease_and_count_closed_groups_and_late_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, 0, 1)
    collector, seen = RankCollector("threads"), threading.Event()

    def rank(group: ProcessGroup) -> None:
        pair = group.subgroup(range(2))
        for _ in range(5):
            pair.all_reduce(torch.ones(1000)).wait()
        if group.rank == 1:
            assert seen.wait(60)
            pair.all_reduce(torch.ones(1000)).wait()
            pair.close()
            group.barrier().wait()
            return
        future = pair.all_reduce(torch.ones(1000))
        name = "shoal_awaited_seconds_total"
        late = until(
            lambda: (
                (now := values(collector)).get((name, "1"), 0.0) > now.get((name, "0"), 0.0) + 0.05
                and now["shoal_operations_total", "1"] == 5
                and now
            )
        )
        assert late["shoal_operations_total", "0"] == 5
        assert late["shoal_operation_bytes_total", "1"] == 20000
        assert late["shoal_ranks", "waits"] == late["shoal_pending_operations", "0"] == 1
        assert late["shoal_waited_seconds_total", "0"] > 0
        assert late["shoal_pending_operation_age_seconds", "0"] > 0
        assert late["shoal_pending_operation_age_seconds", "1"] == 0
        assert late["shoal_resident_memory_bytes", "0"] > late["shoal_shared_memory_bytes", "0"] > 0
        further = values(RankCollector(None))  # another reader, of all jobs
        assert further["shoal_operations_total", "0"] == 5
        seen.set()
        future.wait()
        before = until(lambda: (now := values(collector))["shoal_operations_total", "0"] == 6 and now)
        pair.close()
        group.barrier().wait()
        after = until(lambda: (now := values(collector))["shoal_operations_total", "0"] == 7 and now)
        for key, value in after.items():
            if key[0].endswith(("_total", "_bucket")):
                assert value >= before[key] >= late[key], key
        latencies = [value for key, value in after.items() if key[0].endswith("_bucket") and key[1] == "0"]
        assert latencies == sorted(latencies)
        assert latencies[-1] == 7

    run_threads(rank, 2)


def test_waits_of_closed_groups_become_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "_MAX_UNSEEN_GROUPS", 2)
    collector = RankCollector(None)

    def awaited(groups: Sequence[int], *, seconds: float = 0.5, started: int = 1) -> float:
        late = {(group, 1): seconds for group in groups}
        row: Any = SimpleNamespace(job="j", rank=0)
        samples = [(row, RankTotals(started, 0.0, 0, 0, 0.0, 0.0, late, ()))]
        return collector._awaited(samples)["j", 1]

    for step in range(100):
        assert awaited([0, step + 1]) == 0.5 * (step + 2)
    assert awaited([99]) == 0.5 * 101  # a group that is seen again does not count twice
    assert awaited([0], seconds=0.75) == 0.5 * 101 + 0.25
    for start in range(2, 10):  # processes that end and are replaced
        assert awaited([0], started=start) == 0.5 * 101 + 0.25 + 0.5 * (start - 1)
    assert len(collector._late) == 3
    assert collector._awaited([]) == {}
    assert not collector._late
    assert not collector._earlier


def test_no_counter_jumps_or_decreases_when_a_rank_gets_and_ends_another_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_status, "_SEARCH_INTERVAL_S", 0.0)
    only(monkeypatch, 0, 1)
    collector = RankCollector("threads")
    operations, awaited = "shoal_operations_total", "shoal_awaited_seconds_total"

    def completed(count: int) -> Values:
        return until(lambda: (now := values(collector)).get((operations, "0")) == count and now)

    def rank(group: ProcessGroup) -> None:
        if group.rank == 1:
            time.sleep(0.5)
        group.all_reduce(torch.ones(10)).wait()
        if group.rank == 0:
            first = completed(1)
            sampler = Sampler("threads")
            sampler.rows()

            def inner(second: ProcessGroup) -> None:
                second.all_reduce(torch.ones(10)).wait()
                second.barrier().wait()
                if second.rank == 0:
                    completed(3)
                    assert sampler.rows()[1].awaited < 0.5  # since the last call
                second.barrier().wait()

            run_threads(inner, 2)
            last = values(collector)
            assert last[operations, "0"] >= 3
            for key, value in last.items():
                if key[0].endswith(("_total", "_bucket")):
                    assert value >= first[key], key
            assert 0.4 < last[awaited, "1"] < first[awaited, "1"] + 0.4
        group.barrier().wait()

    run_threads(rank, 2)


def test_ranks_on_other_hosts_have_the_counters_of_their_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 0)
    collector = RankCollector("threads")

    def rank(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(1000)).wait()
        if group.rank == 0:
            name = "shoal_operations_total"
            found = until(lambda: (now := values(collector)).get((name, "1")) == 1 and now)
            assert found["shoal_operation_bytes_total", "1"] == 4000
            assert ("shoal_cpu_seconds_total", "0") in found
            assert ("shoal_cpu_seconds_total", "1") not in found
        group.barrier().wait()

    run_threads(rank, 2, hosts=("a", "b"), heartbeat_timeout=0.4)


#: rank 1 dies, rank 0 goes on without it, and another process joins
SCRIPT = """
import socket
from shoal import failure_report
def listens(fd):
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            return found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        return False
assert not [name for name in os.listdir("/proc/self/fd") if listens(int(name))]
if joins:
    join()
    tell("joined")
elif slot == "1":
    await_file("die")
    os.kill(os.getpid(), signal.SIGKILL)
else:
    tell("ready")
    await_file("joined")
    failure_report.notified([1])
    failure_report.rebuilt()
await_file("end")
"""


@pytest.mark.parametrize("hosts", [False, True])
def test_a_launcher_counts_what_happens_to_its_processes_and_closes_its_port(
    far: Workshop, hosts: bool
) -> None:
    (far.path / "script.py").write_text(PRELUDE + textwrap.dedent(SCRIPT))
    where = ["--hosts", "h1:2"] if hosts else ["-n", "2"]
    job = far.shoal("run", *where, "--min", "1", "--respawn", "--metrics", ":0", "script.py")
    url = said(job, "/metrics").split()[-1]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
    far.read("ready")
    first = scrape(url)
    assert first["shoal_processes",] == first["shoal_started_processes_total",] == 2
    assert first["shoal_ranks", "waits"] == first["shoal_failures_total",] == 0
    (far.path / "die").touch()
    until(lambda: scrape(url)["shoal_rebuilds_total",] == 1)
    now = scrape(url)
    for name, count in (("failures", 1), ("joins", 1), ("started_processes", 3), ("evictions", 0)):
        assert now[f"shoal_{name}_total",] == count
    assert now["shoal_processes",] == 2
    (far.path / "end").touch()
    code, _, err = far.end(job)
    assert code == 0, err
    assert refuses(url)


def test_restarts_of_a_job_keep_the_port_and_the_counters(workshop: Workshop) -> None:
    script = """
    if os.environ["SHOAL_EPOCH"] == "0":
        sys.exit(3)
    tell(f"again{rank}")
    await_file("end")
    """
    job = workshop.start(script, options=["--max-restarts", "1", "--metrics", "localhost:0"])
    url = said(job, "/metrics").split()[-1]
    for rank in range(2):
        workshop.read(f"again{rank}")
    now = scrape(url)
    assert now["shoal_restarts_total",] == now["shoal_failures_total",] == 1
    assert (now["shoal_started_processes_total",], now["shoal_processes",]) == (4, 2)
    job.send_signal(signal.SIGKILL)  # nor does a killed launcher leave a port
    workshop.end(job)
    until(lambda: refuses(url))


def test_a_store_exports_the_number_of_its_keys_and_connections(workshop: Workshop, tmp_path: Path) -> None:
    host = workshop.shoal("store", "--metrics", "[::1]:0" if _has_ipv6() else ":0", "--size", "3")
    assert host.stdout is not None
    address, url = (host.stdout.readline().decode().split()[-1] for _ in range(2))
    before = scrape(url)
    assert before["shoal_store_connections",] == 0
    with open_store(address, secret=user_secret(), timeout=30) as store:
        store.set("key", b"value")
        now = scrape(url)
    assert now["shoal_store_keys",] == before["shoal_store_keys",] + 1
    assert now["shoal_store_connections",] == 1
    assert ("shoal_ranks", "waits") in now
    host.send_signal(signal.SIGTERM)
    assert workshop.end(host) == (0, b"", b"")
    assert refuses(url)


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize("address", ["", "9400", ":", "h:", "[::1]", "::1:9400", ":70000", "[::1:9400"])
@pytest.mark.parametrize("command", [["run", "--metrics", "{}", "true"], ["store", "--metrics", "{}"]])
def test_a_wrong_address_is_one_line_and_code_2(
    command: list[str], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([word.format(address) for word in command]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert repr(address) in err or f"127.0.0.1{address}" in err


def test_without_a_free_port_or_the_package_no_rank_starts(workshop: Workshop, tmp_path: Path) -> None:
    script = "tell('ran')"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f":{taken.getsockname()[1]}"
        code, _, err = workshop.run(script, options=["--metrics", port])
    assert (code, err.count(b"\n")) == (2, 1)
    assert f"cannot listen on 127.0.0.1{port}: Address already in use".encode() in err
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "prometheus_client.py").write_text("raise ImportError('no such package')")
    paths = os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}
    code, _, err = workshop.run(script, options=["--metrics", ":0"], env=env)
    assert (code, err.count(b"\n")) == (2, 1)
    assert b"pip install 'shoal[metrics]'" in err
    assert not (workshop.path / "ran").exists()


def test_silent_and_malformed_clients_do_not_keep_others_from_scraping() -> None:
    with contextlib.closing(MetricsEndpoint("127.0.0.1", 0)) as endpoint, contextlib.ExitStack() as clients:
        endpoint.add_job("a", JobCounters())
        assert endpoint.start()
        assert not endpoint.start()
        port = int(endpoint.url.split(":")[2].partition("/")[0])
        connections = [
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(_MAX_CONNECTIONS + 4)
        ]
        # The first four are closed at once.
        assert [each.recv(1) for each in connections[:4]] == [b""] * 4
        assert not refuses(endpoint.url)
        connections[-1].sendall(b"\xff\0 no request\r\n\r\n")
        with connections[-1].makefile("rb") as answer:
            assert b"400" in answer.read()
        connections[-2].sendall(b"POST /metrics HTTP/1.0\r\n\r\n")
        with connections[-2].makefile("rb") as answer:
            assert b"501" in answer.read()
    assert refuses(endpoint.url)


def test_a_client_must_send_its_whole_request_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.metrics.endpoint._CLIENT_TIMEOUT_S", 0.3)
    with contextlib.closing(MetricsEndpoint("127.0.0.1", 0)) as endpoint:
        endpoint.start()
        port = int(endpoint.url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            client.settimeout(0.05)

            def disconnected() -> bool:
                try:
                    client.sendall(b"x")
                    return client.recv(1) == b""
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            until(disconnected)


def test_malformed_requests_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(MetricsEndpoint("127.0.0.1", 0)) as endpoint:
        endpoint.start()
        port = int(endpoint.url.split(":")[2].partition("/")[0])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(b"GET http://[::1/metrics HTTP/1.0\r\n\r\n")
                assert client.recv(1) == b""
        assert scrape(endpoint.url) == {}
    assert [record.message for record in caplog.records] == [
        "a scrape failed; later errors have the level DEBUG"
    ]


def _expressions() -> list[str]:
    dashboard = json.loads((EXAMPLE / "dashboard.json").read_text())
    variables = [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + variables


def test_the_dashboard_and_the_page_name_the_metrics_that_there_are() -> None:
    with TCPStoreServer() as server:
        collectors: list[Any] = [
            RankCollector(None), JobCollector("a", JobCounters()), StoreCollector(server)
        ]  # fmt: skip
        families = [family for each in collectors for family in each.collect()]
    suffixes = {"counter": "_total", "histogram": "_bucket", "gauge": ""}
    exported = {family.name + suffixes[family.type] for family in families}
    shown = set(re.findall(r"shoal_\w+", " ".join(_expressions())))
    assert shown <= exported
    store = {name for name in exported if name.startswith("shoal_store_")}
    assert exported - shown - store <= {"shoal_pending_operations", "shoal_started_processes_total"}
    page = (EXAMPLE.parents[1] / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(shoal_\w+)", page, re.MULTILINE)) == exported


#: a world of shoal, then one of torch
TORCH = """
import torch
import torch.distributed as dist
import shoal
{prepare}
with shoal.init() as group:
    group.barrier().wait()
dist.init_process_group("shoal")
dist.all_reduce(torch.ones(1000))
dist.all_reduce(torch.ones(1000))
tell(f"job{{rank}}", os.environ["SHOAL_JOB"])
await_file("end")
dist.destroy_process_group()
"""
#: the rendezvous is shoal's, as torch's variables are missing
LAUNCHED = """
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
"""


@pytest.mark.parametrize("prepare", ["", LAUNCHED])
def test_ranks_of_torch_distributed_have_the_name_of_the_job_in_metrics_top_and_traces(
    workshop: Workshop, tmp_path: Path, prepare: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = workshop.start(
        TORCH.format(prepare=prepare),
        options=["--metrics", ":0"],
        env={**os.environ, "SHOAL_TRACE": str(tmp_path / "traces")},
    )
    url = said(job, "/metrics").split()[-1]
    name = workshop.read("job0")
    assert workshop.read("job1") == name
    total = "shoal_operations_total"
    until(lambda: (now := scrape(url)).get((total, "0")) == now.get((total, "1")) == 2)
    assert invoke(["top", "--once", "--json", "--job", name]) == 0
    assert [row["job"] for row in json.loads(capsys.readouterr().out)["ranks"]] == [name] * 2
    assert invoke(["doctor", "--job", name]) == 0
    assert "no rank of such a job" not in capsys.readouterr().out
    (workshop.path / "end").touch()
    code, _, err = workshop.end(job)
    assert code == 0, err
    merged = tmp_path / "merged.json"
    assert invoke(["trace", "merge", str(tmp_path / "traces"), "--job", name, "-o", str(merged)]) == 0
    names = ChromeTrace(merged).names("process")
    assert {"rank 0", "rank 1"} < names
    assert len(names) == 4  # torch's world is beside the other one
    assert all("of meeting" in other for other in names - {"rank 0", "rank 1"})


#: rank 1 is late, until it is killed; rank 0 goes on without it
LATE = """
import torch
import shoal
with shoal.init() as group:
    tell(f"pid{group.rank}", os.getpid())
    try:
        while True:
            if group.rank == 1:
                time.sleep(0.01)
            group.all_reduce(torch.ones(1000)).wait()
    except shoal.PeerLost:
        group = group.rebuild()
    await_file("end")
"""


@needs_prometheus
def test_prometheus_scrapes_a_job_and_answers_the_expressions_of_the_dashboard(
    workshop: Workshop, tmp_path: Path
) -> None:
    port = free_port()
    job = workshop.start(LATE, options=["--min", "1", "--metrics", f":{port}"])
    example = (EXAMPLE / "prometheus.yml").read_text()
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(
        example.replace("127.0.0.1:9400", f"127.0.0.1:{port}").replace(": 5s", ": 200ms")
    )
    if shutil.which("promtool"):
        subprocess.run(["promtool", "check", "config", configuration], check=True, capture_output=True)
    victim = workshop.pids("pid0", "pid1")[1]
    with PrometheusServer(tmp_path, configuration) as prometheus:
        name = "shoal_awaited_seconds_total"
        late = until(lambda: prometheus.query(f'{name}{{rank="1"}} > 0.2'))
        ((_, _, _, job_name, _),) = late  # sorted by label: __name__, instance, job, job_name, rank
        until(lambda: prometheus.query(f'rate({name}{{rank="1"}}[5s]) > 0.1'))
        ranks = prometheus.query(f'sum(shoal_ranks{{job_name="{job_name}"}})')
        assert ranks == {(): 2.0}
        assert prometheus.query(f'{name}{{rank="1"}} > on(job_name) {name}{{rank="0"}}')
        for expression in _expressions()[:-1]:
            full = expression.replace("$job", job_name).replace("$__rate_interval", "5s")
            found = prometheus.query(full)
            assert found, full
            assert not any(math.isnan(value) for value in found.values()), full
        if shutil.which("promtool"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read()
            subprocess.run(["promtool", "check", "metrics"], input=text, check=True)
        os.kill(victim, signal.SIGKILL)
        until(lambda: prometheus.query("shoal_failures_total == 1"))
        until(lambda: prometheus.query("shoal_rebuilds_total == 1"))
        until(lambda: prometheus.query("sum(shoal_ranks) == 1"))
        assert prometheus.query("shoal_processes == 1")
    (workshop.path / "end").touch()
    code, _, err = workshop.end(job)
    assert code == 0, err
