"""torch.profiler shows the operations of groups, and traces have what analysers read."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal import GroupSpec, ProcessGroup
from shoal.group.diagnostics.profiler_traces import with_operations
from shoal.group.profiling import metadata
from shoal.spec import DTYPE_CODES
from shoal.testing import run_threads
from tests.support.programs import run_program

Event = dict[str, Any]

PATIENCE = 30.0

#: HolisticTraceAnalysis and what it needs, installed by make beside .venv
HTA = Path(__file__).parents[2] / "build" / "hta"

PROGRAM = """
import sys
import shoal, torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

torch.set_num_threads(1)
dist.init_process_group("shoal")
group = dist.group.WORLD.group
net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
models = [
    torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.3),
    shoal.DistributedDataParallel(torch.nn.Linear(64, 64), group=group),
]
with profile(
    activities=[ProfilerActivity.CPU],
    record_shapes=True,
    schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
    on_trace_ready=shoal.profiler_handler(sys.argv[1], worker_name=f"rank{dist.get_rank()}"),
) as profiler:
    for _ in range(5):
        models[0](torch.ones(32, 256)).sum().backward()
        models[1](torch.ones(8, 64)).sum().backward()
        future = group.all_reduce(torch.ones(3))
        future.then(lambda _: group.all_reduce(torch.ones(7)).wait()).wait()
        dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5))
        peer = 1 - dist.get_rank()
        works = dist.batch_isend_irecv([
            dist.P2POp(operation, torch.ones(size), peer)
            for operation in (dist.isend, dist.irecv)
            for size in (11, 12)
        ])
        for work in works:
            work.wait()
        profiler.step()
dist.barrier()
dist.destroy_process_group()
"""


def exported(profiler: profile, path: Path) -> list[Event]:
    profiler.export_chrome_trace(str(path))
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def doomed(group: ProcessGroup) -> tuple[list[Any], weakref.ref[Any]]:
    future = group.all_reduce(torch.ones(1), timeout=0.05)
    return [future], weakref.ref(future)


def test_submissions_and_blocking_waits_are_ranges_with_torchs_metadata(tmp_path: Path) -> None:
    late = [threading.Event(), threading.Event()]
    events: list[Event] = []

    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        strided = torch.ones(4, 2)[:, 0]
        if group.rank == 1:
            for event in late:
                event.wait(PATIENCE)
                group.all_reduce(strided).wait()
            group.reduce_scatter(torch.ones(2), [torch.ones(1), torch.ones(2)]).wait()
            group.send(torch.ones(3, dtype=torch.float64), 0, 5).wait()
            group.barrier().wait()
            return
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            plain = group.all_reduce(torch.ones(4))
            with pytest.raises(shoal.WaitTimeout):
                plain.wait(0.01)
            late[0].set()
            assert plain.wait().tolist() == [2, 2, 2, 2]
            staged = group.all_reduce(strided)
            with pytest.raises(shoal.WaitTimeout):
                staged.wait(0.01)
            late[1].set()
            assert staged.wait() is strided
            group.reduce_scatter(torch.ones(1), [torch.ones(1), torch.ones(2)]).wait()
            group.recv(src=1, tag=5).wait()
            unfinished = group.barrier()
            gc.disable()  # an error must not keep its future by a cycle
            try:
                failing, reference = doomed(group)
                with pytest.raises(shoal.GroupError):
                    failing.pop().wait()
                assert reference() is None
            finally:
                gc.enable()
        assert unfinished.result() is None
        events.extend(exported(profiler, tmp_path / "trace.json"))

    run_threads(rank, 2, timeout=PATIENCE)
    first, second, _ = named(events, "shoal::all_reduce")
    described = {
        "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 4, "Out msg nelems": 4,
        "Group size": 2, "Process Group Name": "world", "Process Group Description": "world",
        "Process Group Ranks": "[0, 1]", "Seq": 1,
    }  # fmt: skip
    assert described.items() <= first["args"].items()
    assert second["args"]["Seq"] == 2
    waits = [(event["args"]["Waits for"], event["args"]["Seq"]) for event in named(events, "shoal::wait")]
    assert {("all_reduce", 1), ("all_reduce", 2)} <= set(waits)
    (scattered,) = named(events, "shoal::reduce_scatter")
    assert (scattered["args"]["In msg nelems"], scattered["args"]["Out msg nelems"]) == (3, 1)
    (received,) = named(events, "shoal::recv")
    assert (received["args"]["Src Rank"], received["args"]["Dst Rank"]) == (1, 0)
    assert "Seq" not in received["args"]
    assert len(named(events, "shoal::barrier")) == 1


def test_every_dtype_has_a_name_of_torch() -> None:
    spec = GroupSpec("g", 0, 0, (0,))
    for dtype in DTYPE_CODES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex32 is experimental
            kind = torch.empty(0, dtype=dtype).type()
        assert f"torch.{metadata(spec, 'reduce', dtype, 1, 0)['dtype']}Tensor" == kind


# -- traces ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of a DDP training on two ranks."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "program.py").write_text(PROGRAM)
    run_program(folder / "program.py", 2, str(folder / "out"), folder=folder)
    return folder / "out"


def read(traces: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in traces.iterdir()]
    return {trace["distributedInfo"]["rank"]: trace for trace in found}


def kernels(trace: dict[str, Any]) -> tuple[list[Event], list[Event]]:
    """Communication and computation."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return (
        [event for event in found if event["name"].startswith("nccl")],
        [event for event in found if not event["name"].startswith("nccl")],
    )


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def test_a_trace_has_the_operations_of_ddp_and_of_callbacks(traces: Path) -> None:
    found = read(traces)
    assert set(found) == {0, 1}
    for rank, trace in found.items():
        assert trace["distributedInfo"]["world_size"] == 2
        events = trace["traceEvents"]
        launches = {
            event["args"]["correlation"]: event
            for event in events
            if event["ph"] == "X" and event["cat"] != "kernel" and "correlation" in event["args"]
        }
        communication, computation = kernels(trace)
        for event in communication:
            launch = launches[event["args"]["correlation"]]
            kind = event["name"].removeprefix("ncclKernel_")
            assert launch["name"] == f"shoal::{kind}" or event["args"]["In msg nelems"] == 7
            assert launch["ts"] - 20 <= event["ts"] <= end(launch) + 20  # the clocks differ
            if "Seq" in event["args"]:
                assert {**launch["args"], **event["args"]} == {**event["args"], **launch["args"]}
        reduced = [event["args"]["In msg nelems"] for event in communication if "Seq" in event["args"]]
        assert sum(reduced) >= 3 * (4 * 256 * 257 + 64 * 65)
        assert len([event for event in communication if event["args"]["In msg nelems"] == 7]) == 3, rank
        assert len(named(communication, "ncclKernel_all_gather")) == 3
        sends, receives = (named(communication, f"ncclKernel_{kind}") for kind in ("send", "recv"))
        assert sorted(event["args"]["In msg nelems"] for event in sends) == [11, 11, 11, 12, 12, 12]
        assert sorted(event["args"]["Out msg nelems"] for event in receives) == [11, 11, 11, 12, 12, 12]
        for messages, ends in ((sends, (rank, 1 - rank)), (receives, (1 - rank, rank))):
            found_ends = {(event["args"]["Src Rank"], event["args"]["Dst Rank"]) for event in messages}
            assert found_ends == {ends}
        for event in named(communication, "ncclKernel_all_reduce"):
            assert event["args"]["Out msg nelems"] == event["args"]["In msg nelems"]
        assert {"aten::linear", "aten::ones"} <= {event["name"] for event in computation}
        assert all(launches[event["args"]["correlation"]]["name"] == event["name"] for event in computation)
        for lane in {event["tid"] for event in communication + computation}:
            own = sorted((event for event in communication + computation if event["tid"] == lane), key=end)
            assert all(end(one) <= other["ts"] + 0.01 for one, other in pairwise(own))
            (name,) = [event for event in events if event["tid"] == lane and event["name"] == "thread_name"]
            assert name["args"]["name"].startswith("shoal: ")
        ranges = [event for event in events if event["name"].startswith("shoal::")]
        for event in computation:
            assert not any(event["ts"] < end(one) and one["ts"] < end(event) for one in ranges)


def overlap(trace: dict[str, Any]) -> float:
    """The percentage of the time of communication with computation, in all steps except the last."""
    events = trace["traceEvents"]
    last = max(event["ts"] for event in events if event["name"].startswith("ProfilerStep#"))
    communication, computation = (
        [event for event in own if event["ts"] < last] for own in kernels(trace)
    )  # fmt: skip
    marks = sorted(
        mark
        for own, weight in ((communication, 1), (computation, 1000))
        for event in own
        for mark in ((event["ts"], weight), (end(event), -weight))
    )
    running, total, both = 0, 0.0, 0.0
    for (begin, change), (until, _) in pairwise(marks):
        running += change
        total += (until - begin) * (running % 1000 > 0)
        both += (until - begin) * (running % 1000 > 0 and running >= 1000)
    return 100 * both / total


def test_holistic_trace_analysis_computes_the_overlap(traces: Path) -> None:
    expected = {rank: overlap(trace) for rank, trace in read(traces).items()}
    assert all(0 < percentage < 100 for percentage in expected.values()), expected
    program = (
        "import sys\n"
        "try:\n    from hta.trace_analysis import TraceAnalysis\nexcept ImportError:\n    sys.exit(3)\n"
        "found = TraceAnalysis(trace_dir=sys.argv[1]).get_comm_comp_overlap(visualize=False)\n"
        "print(found.to_json(orient='records'))"
    )
    path = os.pathsep.join([str(HTA), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", program, str(traces)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if run.returncode == 3:
        pytest.skip(f"{HTA} has no HolisticTraceAnalysis for this Python: the traces were only parsed")
    assert run.returncode == 0, run.stderr
    found = {row["rank"]: row["comp_comm_overlap_pctg"] for row in json.loads(run.stdout.splitlines()[-1])}
    # It rounds times to microseconds, and most operators take few of them.
    assert found == pytest.approx(expected, abs=5)


def test_operations_are_no_kernels_beside_those_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_RECORDER_SIZE", "2")
    trace: dict[str, Any] = {
        "baseTimeNanoseconds": time.time_ns(),
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 1},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 60e6},
        ],
    }

    def rank(group: ProcessGroup) -> dict[str, Any]:
        for size in (1, 2, 3):
            group.all_reduce(torch.ones(size)).wait()
        return with_operations(trace, [group])

    with caplog.at_level(logging.WARNING):
        (merged,) = run_threads(rank, 1)
    assert merged["distributedInfo"] == {"backend": "shoal", "rank": 0, "world_size": 1}
    added = [event for event in merged["traceEvents"] if event.get("cat") == "shoal"]
    assert [event["args"]["In msg nelems"] for event in added] == [2, 3]
    assert all("stream" not in event["args"] for event in added)
    assert [event["name"] for event in kernels(merged)[1]] == ["gemm"]
    (record,) = caplog.records
    assert "the trace has only the last 2 operations; raise SHOAL_RECORDER_SIZE" in record.getMessage()


def test_the_handler_compresses_and_refuses_names_and_places_of_no_file(tmp_path: Path) -> None:
    with profile(
        activities=[ProfilerActivity.CPU],
        on_trace_ready=shoal.profiler_handler(tmp_path / "a", use_gzip=True),
    ):
        torch.ones(1)
    (path,) = (tmp_path / "a").iterdir()
    assert path.name.endswith(".pt.trace.json.gz")
    assert named(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"], "aten::ones")
    for name in ("", "a/b", 5):
        with pytest.raises(shoal.UsageError, match="expected the first part of a file name"):
            shoal.profiler_handler(tmp_path, worker_name=name)  # type: ignore[arg-type]
    for place, name in (("a\0b", None), (tmp_path, "\0")):
        with pytest.raises(shoal.UsageError, match="cannot have a zero character"):
            shoal.profiler_handler(place, worker_name=name)
    with pytest.raises(FileExistsError):
        shoal.profiler_handler(path)(None)


def test_a_trace_that_kineto_writes_as_invalid_json_is_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kineto of torch 2.13 does not escape quotes in names."""
    content = b'{"traceEvents": [{"name": "a "quoted" name"}]}'
    shoal.profiler_handler(tmp_path)(
        SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_bytes(content))
    )
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == content
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path.name}: no operations of shoal are added: Kineto's JSON")
