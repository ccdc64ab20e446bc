"""Test shoal on a machine with a GPU; ``make gpu``.

    make gpu PYTHON=python3 WHEELS=folder

Uses the torch of ``PYTHON``, which must see a GPU. Builds shoal from this checkout into ``build/gpu``, with
wheels from the folder ``WHEELS`` for missing packages (default: from pip's index). Runs the tests marked
``gpu``, and trains with ``init_process_group("cpu:shoal,cuda:nccl")`` and one rank per GPU, and with
``"cpu:shoal,cuda:gloo"`` and two ranks, which may share a GPU (NCCL refuses that). Measures the backend
"nccl" (``gpu_nccl.py``). Writes ``benchmarks/results/gpu-<card>.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "gpu"
#: packages that shoal or its tests import and torch does not depend on -> their modules
NEEDS = {
    "click": "click", "msgspec": "msgspec", "psutil": "psutil", "rich": "rich",
    "nccl4py": "nccl", "cuda-pathfinder": "cuda.pathfinder", "cloudpickle": "cloudpickle",
}  # fmt: skip
#: timeout of a step in seconds
LIMIT_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__)
    parser.add_argument("--wheels", help="folder of wheels, to download nothing")
    parser.add_argument("--results", default=ROOT / "benchmarks" / "results", type=Path, help="folder")
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(f"shoal's GPU tests need a GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    built = _build(given.wheels)
    environment = {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    record: dict[str, Any] = {
        "machine": _machine(),
        "built_seconds": built,
        "date": time.strftime("%Y-%m-%d"),
    }
    cards = torch.cuda.device_count()
    record["tests"] = _tests(environment)
    record["nccl"] = _checks(cards, "nccl", environment)
    # FSDP2 gathers several tensors at once. Gloo (torch 2.11) copies GPU tensors as if they were in host
    # memory, which crashes the process. Accelerate and Lightning need a GPU for each rank.
    without = ("fsdp2", "accelerate", "lightning")
    record["gloo"] = _checks(max(2, cards), "gloo", environment, without=without)
    record["shoal nccl"] = _program(cards, "gpu_nccl.py", (), environment)
    given.results.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    path = given.results / f"gpu-{card}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(json.dumps(record, indent=1, sort_keys=True))
    failed = [
        name for part in ("nccl", "gloo") for name, each in record[part]["checks"].items() if each == "failed"
    ]
    good = (
        record["tests"]["code"] == 0
        and not failed
        and not record["nccl"]["code"]
        and not record["gloo"]["code"]
        and not record["shoal nccl"]["code"]
    )
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


def _tests(environment: dict[str, str]) -> dict[str, Any]:
    """Run the marked tests; only their files are collected, because others need more packages."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    )
    sys.path.insert(0, str(ROOT))
    from tools import retry

    result = retry.run(
        ["-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark"], files, environment=environment
    )
    outcomes = {f"{case.module}::{case.name}": case.outcome for case in result.cases.values()}
    failures = {f"{case.module}::{case.name}": case.output[-3000:] for case in result.flaky}
    failures |= {
        f"{case.module}::{case.name}": case.output[-3000:]
        for case in result.cases.values()
        if case.outcome == "failed"
    }
    return {"code": result.code, "outcomes": outcomes, "failures": failures}


def _program(
    ranks: int, script: str, arguments: Sequence[str], environment: dict[str, str]
) -> dict[str, Any]:
    """Run a program; its figures are the JSON object that rank 0 prints."""
    program = [str(ROOT / "benchmarks" / script), *arguments]
    command = [sys.executable, "-m", "shoal", "run", "-n", str(ranks), *program]
    print("+", " ".join(command), flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        code, text, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, text, errors = 124, _text(expired.stdout), _text(expired.stderr)
    print(text, errors, sep="\n", flush=True)
    figures: dict[str, Any] = {}
    for line in text.splitlines():
        if (start := line.find('{"')) >= 0:
            figures = json.loads(line[start:])
    return {"ranks": ranks, "code": code, "figures": figures, "stderr": errors[-2000:]}


def _checks(
    ranks: int, engine: str, environment: dict[str, str], without: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the checks of gpu_programs.py except those in ``without``."""
    arguments = ["--engine", engine, *(["--without", *without] if without else [])]
    record = _program(ranks, "gpu_programs.py", arguments, environment)
    return {**record, "checks": {name: each["outcome"] for name, each in record["figures"].items()}}


def _text(captured: bytes | str | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


if __name__ == "__main__":
    sys.exit(main())
