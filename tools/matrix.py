"""Run the tests that depend on torch with other releases of it; ``make matrix``.

Each release gets an environment in ``build/matrix`` with torch only; everything else is from ``.venv``. CUDA
builds of torch need NVIDIA's libraries even on the CPU, which all releases share. The first run downloads
about 0.5 GB for each release and 1.5 GB for the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from tools import retry

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "build" / "matrix"
RESULTS = ROOT / "benchmarks" / "results" / "torch-releases.json"
PAGE = ROOT / "docs" / "installation.md"

#: the latest patch of each supported release, except that of constraints.txt, which `make test` uses
RELEASES = ("2.11.0", "2.12.1", "2.14.1", "2.15.0")
#: test folders that depend on torch
SUITES = ("compat", "parallel", "controller", "rpc", "elastic", "frontend")
#: test files that show within minutes whether a release works
QUICK = (
    "tests/compat/test_groups.py", "tests/compat/test_functional.py", "tests/compat/test_failures.py",
    "tests/compat/test_reductions.py", "tests/compat/ecosystem/test_ddp.py",
    "tests/compat/ecosystem/test_fsdp.py", "tests/parallel/ddp/test_training.py",
    "tests/common/test_torch_release.py", "tests/compat/test_hooks.py",
    "tests/backend/test_nccl_library.py", "tests/frontend/test_ddp.py", "tests/group/test_profiling.py",
    "tests/tools/test_torch_dumps.py",
)  # fmt: skip
OPTIONS = ("-q", "-m", "not stress", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")

#: NVIDIA's libraries of torch 2.14.1 with a newer nvshmem, which work with torch 2.11 to 2.15
NVIDIA = (
    "nvidia-cublas==13.1.1.3", "nvidia-cuda-cupti==13.0.85", "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96", "nvidia-cudnn-cu13==9.24.0.43", "nvidia-cufft==12.0.0.61",
    "nvidia-cufile==1.15.1.6", "nvidia-curand==10.4.0.35", "nvidia-cusolver==12.0.4.66",
    "nvidia-cusparse==12.6.3.3", "nvidia-cusparselt-cu13==0.8.1", "nvidia-nccl-cu13==2.30.7",
    "nvidia-nvjitlink>=13.0.88,<14", "nvidia-nvshmem-cu13==3.7.2", "nvidia-nvtx==13.0.85",
)  # fmt: skip
#: the largest of these libraries
LARGEST = NVIDIA[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--quick", action="store_true", help="the demo and a few files; results are not kept")
    parser.add_argument(
        "--if-local", action="store_true", help="skip releases whose wheel pip would have to download"
    )
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES, help="default: all")
    given = parser.parse_args(arguments)
    failed = False
    for release in given.releases or RELEASES:
        if given.if_local and not (_is_local(f"torch=={release}") and _is_local(LARGEST)):
            print(f"torch {release} is not available without a download: skipped", flush=True)
            continue
        python = prepare(release)
        print(f"torch {release}: tests", flush=True)
        if given.quick:
            failed |= not _quick(python)
        else:
            failed |= not _all(python, release, given.suites)
    return int(failed)


def prepare(release: str) -> str:
    """Create the environment of a release if it is missing; return its Python."""
    folder = ENVIRONMENTS / release
    python = folder / "bin" / "python"
    done = folder / "done"
    if done.exists():
        return str(python)
    print(f"torch {release}: making {folder.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    _pip(["--python", str(python)], ["--no-deps", "--no-compile", f"torch=={release}"])
    (packages,) = folder.glob("lib/python3*/site-packages")
    needs = _requirements(packages)
    shared = [path for path in sys.path if path.endswith("site-packages")]
    if any(need.startswith("nvidia-") for need in needs):
        shared.insert(0, str(_nvidia()))
    triton = [need for need in needs if need.startswith("triton")]
    if triton:
        _pip(["--python", str(python)], ["--no-deps", "--no-compile", *triton])
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    done.touch()
    return str(python)


def _requirements(packages: Path) -> list[str]:
    """Return the requirements of the torch installed in a folder, without markers."""
    (info,) = packages.glob("torch-*.dist-info")
    return [need.partition(";")[0].strip() for need in PathDistribution(info).requires or ()]


def _nvidia() -> Path:
    folder = ENVIRONMENTS / "nvidia"
    if not (folder / "done").exists():
        _pip([], ["--no-deps", "--upgrade", "--target", str(folder), *NVIDIA])
        (folder / "done").touch()
    return folder


def _pip(general: list[str], arguments: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *general]
    subprocess.run([*pip, "install", "--quiet", *arguments], check=True)


def _is_local(requirement: str) -> bool:
    """Whether pip would install a package from this machine's disk."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    plan = [*pip, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", requirement]
    try:
        answer = subprocess.run(plan, capture_output=True, text=True, timeout=300, check=True).stdout
        return str(json.loads(answer)["install"][0]["download_info"]["url"]).startswith("file:")
    except (subprocess.SubprocessError, ValueError, LookupError):
        return False


def _environment() -> dict[str, str]:
    # Without a GPU, CUDA builds warn about a missing compiler, which tests report as a failure.
    return {**os.environ, "CUDA_HOME": "", "CUDA_PATH": ""}


def _quick(python: str) -> bool:
    demo = [python, "-m", "shoal", "run", "-n", "2", "examples/digits.py"]
    if subprocess.run(demo, cwd=ROOT, env=_environment(), check=False).returncode:
        return False
    result = retry.run(OPTIONS, QUICK, python=python, environment=_environment())
    retry.report(result)
    return result.code == 0


def _all(python: str, release: str, suites: Sequence[str]) -> bool:
    result = retry.run(
        OPTIONS, [f"tests/{suite}" for suite in suites], python=python, environment=_environment()
    )
    retry.report(result)
    if not result.cases:
        return False  # pytest itself failed
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for suite in suites:
        folder = f"tests/{suite}/"
        failed = [case for case in result.cases.values() if case.outcome == "failed"]
        kept.setdefault(release, {})[suite] = {
            **{outcome: result.count(outcome, folder) for outcome in ("passed", "failed", "skipped")},
            "failures": _names(failed, folder),
            "flaky": _names(result.flaky, folder),
            "python": platform.python_version(),
            "processor": _processor(),
            "commit": _git("rev-parse", "--short", "HEAD"),
            "date": time.strftime("%Y-%m-%d"),
        }
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    write_table()
    return result.code == 0


def _names(cases: Iterable[retry.Case], folder: str) -> list[str]:
    return sorted(f"{case.module}::{case.name}" for case in cases if case.module.startswith(folder))


def table() -> str:
    """Return the table of the installation page, from the saved results."""
    kept = json.loads(RESULTS.read_text())
    lines = [f"| torch | {' | '.join(SUITES)} |", "| --- |" + " --- |" * len(SUITES)]
    for release in RELEASES:
        cells = [_cell(kept.get(release, {}).get(suite)) for suite in SUITES]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "not run as a whole"
    return f"{record['passed']} passed" + (f", {record['failed']} failed" if record["failed"] else "")


def write_table() -> None:
    """Write the table into the installation page, between its two markers."""
    text = PAGE.read_text()
    begin, end = "<!-- releases: begin, written by `make matrix` -->", "<!-- releases: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise SystemExit(f"{PAGE}: the markers of the table of releases are missing")
    PAGE.write_text(f"{before}{begin}\n{table()}\n{end}{after}")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
