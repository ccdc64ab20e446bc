"""Functions that doctor runs in child processes. They import the libraries that they examine."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

#: all-reduces of the self test that are measured
_REPETITIONS = 200


def core() -> str:
    """Load the native module and return the path of its file."""
    return str(import_module("shoal._core").__file__)


def torch_facts() -> dict[str, Any]:
    """Import torch and ask it for its version, and for CUDA."""
    begin = time.monotonic()
    import torch

    seconds = time.monotonic() - begin
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "file": str(torch.__file__),
        "seconds": seconds,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        if available
        else [],
        "warning": str(caught[0].message) if caught else "",
    }


def cuda_driver() -> int:
    """Return the newest CUDA version that the driver supports, such as 13000, or 0 without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def nccl() -> dict[str, Any]:
    """Load NCCL as the backend "nccl" does; return its version, that of torch, and the loaded files."""
    import torch

    from ...backend.nccl.library import load, version_text

    own = load().version()
    torchs = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {
        "version": version_text(own),
        "torch": ".".join(map(str, torchs)) if isinstance(torchs, tuple) else str(torchs),
        "files": _loaded("libnccl.so"),
    }


def mpi() -> dict[str, str]:
    """Initialise MPI as the backend "mpi" does, for several threads; return the library and its file."""
    from importlib import metadata

    from ...common.mpi_library import library_name
    from ...common.mpi_library import mpi as load

    module = load()
    levels = {getattr(module, name): name for name in ("THREAD_SERIALIZED", "THREAD_MULTIPLE")}
    return {
        "library": library_name(module),
        "mpi4py": metadata.version("mpi4py"),
        "threads": levels.get(module.Query_thread(), "less than THREAD_SERIALIZED"),
        "file": ", ".join(_loaded("libmpi")) or "linked into mpi4py",
    }


def _loaded(name: str) -> list[str]:
    """Return the paths of loaded libraries whose file names begin with ``name``."""
    lines = Path("/proc/self/maps").read_text(errors="backslashreplace").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return sorted(path for path in paths if os.path.basename(path).startswith(name))


def rank(transports: list[str]) -> dict[str, Any]:
    """A rank of the self test: for each transport, the median time of an all-reduce in us, or an error."""
    results: dict[str, Any] = {}
    for transport in transports:
        try:
            results[transport] = _all_reduce(transport)
        except Exception as error:
            results[transport] = f"{type(error).__name__}: {error}"
    return results


def _all_reduce(transport: str) -> float:
    import torch

    from ...initialize import init

    torch.set_num_threads(1)
    with init(transport=transport, job=f"doctor-{transport}") as group:
        large = torch.full((100_000,), float(group.rank + 1), device="cpu")
        group.all_reduce(large).wait()
        expected = group.size * (group.size + 1) / 2
        if not bool((large == expected).all()):
            raise ArithmeticError(
                f"wrong sum: expected {expected} in all elements, got {large.min()} to {large.max()}"
            )
        small, times = torch.zeros(2, device="cpu"), []
        for _ in range(_REPETITIONS):
            begin = time.perf_counter()
            group.all_reduce(small).wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6
