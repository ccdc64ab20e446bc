"""Test shoal on a machine with a GPU; ``make gpu``.

    make gpu PYTHON=python3 WHEELS=folder

Uses the torch of ``PYTHON``, which must see a GPU. Builds shoal from this checkout into ``build/gpu``, with
wheels from the folder ``WHEELS`` for missing packages (default: from pip's index). Runs the tests marked
``gpu``, and trains with ``init_process_group("cpu:shoal,cuda:nccl")`` and one rank per GPU, and with
``"cpu:shoal,cuda:gloo"`` and two ranks, which may share a GPU (NCCL refuses that). Measures the backend
"nccl" (``gpu_nccl.py``). Writes ``benchmarks/results/gpu-<card>.json`` after each part.

``NCCL=libnccl.so.2`` of NCCL 2.30 or newer also tests collectives of two and three ranks on one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "gpu"
#: packages that shoal or its tests import and torch does not depend on -> their modules
NEEDS = {
    "click": "click", "msgspec": "msgspec", "psutil": "psutil", "rich": "rich",
    "nccl4py": "nccl", "cuda-pathfinder": "cuda.pathfinder", "cloudpickle": "cloudpickle",
}  # fmt: skip
#: exit codes of pytest
PASSED, FAILED, NO_TESTS = 0, 1, 5
#: timeout of a step in seconds
LIMIT_S = 200.0
#: seconds that one test may take; then its process writes the stacks of all threads and ends.  After 60 s
#: run_threads and RankPool raise, with the stacks of the ranks.
TEST_S = 75
#: maximum number of processes for one file: after a test that hangs, the others run in a new one
MOST_STARTS = 6
#: maximum number of characters of a failure in the results
MOST_OUTPUT = 6000
#: files that have not run on a GPU yet come first, because a run may end early
FIRST = ("tests/backend/test_nccl_gpu.py", "tests/test_streams.py")

Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__)
    parser.add_argument("--wheels", help="folder of wheels, to download nothing")
    parser.add_argument("--results", default=ROOT / "benchmarks" / "results", type=Path, help="folder")
    parser.add_argument("--nccl", help="libnccl.so.2 of 2.30 or newer, for two ranks on one GPU")
    parser.add_argument("--seconds", default=540.0, type=float, help="for everything")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    import torch

    if not torch.cuda.is_available():
        print(f"shoal's GPU tests need a GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    given.results.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    path = given.results / f"gpu-{card}.json"
    record: Record = {"machine": _machine(), "date": time.strftime("%Y-%m-%d")}

    def save(name: str, part: Any) -> None:  # after each part: a later one may hang
        record[name] = part
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")

    save("built_seconds", _build(given.wheels))
    environment = {"NCCL_DEBUG": "WARN", **os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = f"{SITE}{os.pathsep}{ROOT}"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    runner = Runner(environment, deadline)
    runner.tests(_files(), lambda part: save("tests", part))
    if given.nccl:
        shared = {
            **environment,
            "LD_PRELOAD": str(Path(given.nccl).resolve()),
            "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8",
            "NCCL_ALGO": "RING", "NCCL_PROTO": "Simple",  # a small build of NCCL has no others
        }  # fmt: skip
        Runner(shared, deadline).tests(FIRST[:1], lambda part: save("two ranks", part))
    cards = torch.cuda.device_count()
    save("shoal nccl", runner.program(cards, "gpu_nccl.py"))
    save("nccl", runner.checks(cards, "nccl"))
    # FSDP2 gathers several tensors at once. Gloo (torch 2.11) copies GPU tensors as if they were in host
    # memory, which crashes the process. Accelerate and Lightning need a GPU for each rank.
    save("gloo", runner.checks(max(2, cards), "gloo", without=("fsdp2", "accelerate", "lightning")))
    print(json.dumps(record, indent=1, sort_keys=True))
    parts = [part for part in record.values() if isinstance(part, dict)]
    good = not any(part.get("code") or "failed" in part.get("checks", {}).values() for part in parts)
    print(f"{'passed' if good else 'FAILED'}; results: {path}", flush=True)
    return 0 if good else 1


def _build(wheels: str | None) -> float:
    """Build and install shoal and missing packages; return the seconds of the build."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    source = ["--no-index", "--find-links", str(Path(wheels).resolve())] if wheels else []
    missing = [package for package, module in NEEDS.items() if not _is_installed(module)]
    target = ["--upgrade", "--target", str(SITE)]
    if missing:
        subprocess.run([*pip, *source, *target, *missing], check=True, timeout=LIMIT_S)
    started = time.monotonic()
    subprocess.run([*pip, *source, *target, "--no-build-isolation", str(ROOT)], check=True, timeout=LIMIT_S)
    return round(time.monotonic() - started, 1)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def _machine() -> dict[str, Any]:
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.split("\n")[0].strip()  # fmt: skip
    return {
        "card": torch.cuda.get_device_name(0),
        "cards": torch.cuda.device_count(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    }


def _files() -> list[str]:
    """The files with marked tests; only they are collected, because others need more packages."""
    files = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    ]
    return sorted(files, key=lambda name: (name not in FIRST, name))


@dataclass
class Runner:
    """Runs tests and programs until a deadline, on the clock of :func:`time.monotonic`."""

    environment: dict[str, str]
    deadline: float

    def tests(self, files: Sequence[str], save: Callable[[Record], None]) -> None:
        """Run the marked tests of each file in processes of its own; ``save`` is called after each file."""
        record: Record = {"code": 0, "outcomes": {}, "seconds": {}, "failures": {}}
        for file in files:
            self.test_file(file, record)
            save(record)

    def test_file(self, file: str, record: Record) -> None:
        """Add the outcomes of a file's tests to ``record``; after one that hangs or dies, run the others."""
        ended: set[str] = set()
        for _ in range(MOST_STARTS):
            code, output, lines = self._pytest(file, ended)
            begun = {line["test"] for line in lines}
            for line in lines:
                name, outcome = line["test"], line.get("outcome")
                if outcome is None or record["outcomes"].get(name) == "failed":
                    continue
                ended.add(name)
                record["outcomes"][name], record["seconds"][name] = outcome, line["seconds"]
                if outcome == "failed":
                    record["failures"][name] = line["output"]
            died = begun - ended
            for name in died:
                record["outcomes"][name] = "failed"
                record["failures"][name] = f"the process ended with code {code}\n{output}"
            ended |= died
            if code not in (PASSED, NO_TESTS):
                record["code"] = 1
            if not died:
                if code not in (PASSED, FAILED, NO_TESTS):
                    record["failures"][file] = f"pytest ended with code {code}\n{output}"
                return

    def _pytest(self, file: str, ended: Iterable[str]) -> tuple[int, str, list[Record]]:
        """Run the tests of a file without those that have ended; return what the plugin has written, too."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            report.touch()
            command = [
                sys.executable, "-m", "pytest", "-m", "gpu", "-v",
                "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "benchmarks.gpu_report",
                "-o", f"faulthandler_timeout={TEST_S}", file,
                *(f"--deselect={name}" for name in sorted(ended)),
            ]  # fmt: skip
            code, text, errors = self._run(command, SHOAL_GPU_REPORT=str(report))
            lines = [json.loads(line) for line in report.read_text().splitlines()]
        return code, (text + errors)[-MOST_OUTPUT:], lines

    def program(self, ranks: int, script: str, *arguments: str) -> Record:
        """Run a program; its figures are the JSON object that rank 0 prints."""
        program = [str(ROOT / "benchmarks" / script), *arguments]
        command = [sys.executable, "-m", "shoal", "run", "-n", str(ranks), *program]
        print("+", " ".join(command), flush=True)
        code, text, errors = self._run(command)
        figures: Record = {}
        for line in text.splitlines():
            if (start := line.find('{"')) >= 0:
                figures = json.loads(line[start:])
        return {"ranks": ranks, "code": code, "figures": figures, "stderr": errors[-MOST_OUTPUT:]}

    def checks(self, ranks: int, engine: str, without: Sequence[str] = ()) -> Record:
        """Run the checks of gpu_programs.py except those in ``without``."""
        options = ["--without", *without] if without else []
        record = self.program(ranks, "gpu_programs.py", "--engine", engine, *options)
        return {**record, "checks": {name: each["outcome"] for name, each in record["figures"].items()}}

    def _run(self, command: list[str], **variables: str) -> tuple[int, str, str]:
        """Run a program for a limited time; end its children too, which would keep the GPU."""
        seconds = min(LIMIT_S, max(1.0, self.deadline - time.monotonic()))
        environment = {**self.environment, **variables}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            program = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code = program.wait(seconds)
            except subprocess.TimeoutExpired:
                code = 124
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            out.seek(0)
            err.seek(0)
            text, errors = out.read(), err.read()
        print(text, errors, sep="\n", flush=True)
        return code, text, errors


if __name__ == "__main__":
    sys.exit(main())
