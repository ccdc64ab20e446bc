"""Checks of versions and libraries: Python, torch, shoal, MPI, CUDA and NCCL."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ... import config
from ...common import torch_release
from ...common.formatting import counted
from ...errors import ConfigurationError
from ...net import build_version
from ..findings import Finding, fail, ok, warn
from .children import ChildFailed, call

#: variables by which MPI in a child would join the job of an mpiexec that has started this process
_OF_MPIEXEC = ("PMI_", "PMIX_", "PMI2_", "HYDI_", "PRTE_")
_INSTALL_TORCH = f"pip install '{torch_release.REQUIREMENT}' (for CPUs with --index-url https://download.pytorch.org/whl/cpu)"
_CUDA_WHEEL = "install a build of torch for this driver's CUDA version, as https://pytorch.org describes"


def python() -> Finding:
    """Python, the operating system and the architecture."""
    libc = " ".join(platform.libc_ver()).strip() or "unknown libc"
    system = f"Linux {platform.release()} {platform.machine()}, {libc}"
    fact = f"Python {platform.python_version()} ({sys.executable or 'path unknown'}), {system}"
    if sys.implementation.name != "cpython":
        return fail(f"{fact}: {sys.implementation.name}", "run shoal with CPython")
    return ok(fact)


def shoal() -> Finding:
    """The installed package and the imported one."""
    folder = Path(__file__).resolve().parents[2]
    fact = f"shoal {build_version()} in {folder}"
    try:
        places = {str(Path(str(each.locate_file("shoal"))).resolve()) for each in _installations()}
    except OSError:
        places = set()
    if others := sorted(place for place in places - {str(folder)} if Path(place, "__init__.py").exists()):
        return warn(
            f"{fact}; another one is installed in {', '.join(others)}",
            "check PYTHONPATH and the working directory if this is not the one that your jobs should use",
        )
    return ok(fact)


def _installations() -> list[metadata.Distribution]:
    return list(metadata.distributions(name="shoal"))


def core() -> Finding:
    """The native module."""
    try:
        return ok(f"native core {Path(call('core')).name}")
    except ChildFailed as error:
        return fail(
            f"the native core cannot be loaded: {error}",
            "install shoal again with this Python (pip install --force-reinstall --no-deps shoal; in a "
            "checkout, `make core`)",
        )


@functools.cache
def torch_facts() -> dict[str, Any] | str:
    """Return the report of torch in a child process, or why it cannot be imported."""
    try:
        facts: dict[str, Any] = call("torch_facts")
        return facts
    except ChildFailed as error:
        return str(error)


def torch_works() -> bool:
    """Whether torch is a supported release and can be imported."""
    return torch_release.problem() is None and isinstance(torch_facts(), dict)


def torch() -> Finding:
    """The release of torch, and whether it can be imported."""
    installed = torch_release.installed()
    if installed is None and importlib.util.find_spec("torch") is None:
        return fail("torch is not installed", _INSTALL_TORCH)
    if problem := torch_release.problem():
        return fail(problem.partition(": pip")[0], _INSTALL_TORCH)
    facts = torch_facts()
    if isinstance(facts, str):
        return fail(
            f"torch {installed or 'of unknown version'} cannot be imported: {facts}",
            "install torch again: pip install --force-reinstall torch; if it is only slow, on a local disk",
        )
    requirement = torch_release.REQUIREMENT
    fact = f"torch {facts['version']}, imported in {facts['seconds']:.1f} s (supported: {requirement})"
    if untested := torch_release.untested():
        return warn(untested.partition(";")[0], f"if something fails, {_INSTALL_TORCH}")
    if facts["seconds"] > 20:
        return warn(f"{fact}, by every process", "install Python and torch on a local disk or in the image")
    return ok(fact)


def _needed(backend: str, finding: Finding) -> Finding:
    """Make a warning a failure if ``SHOAL_BACKEND`` is ``backend``."""
    if finding.status == "warn" and _backend() == backend:
        finding.status = "fail"
    return finding


def _backend() -> str:
    try:
        return config.BACKEND.get()
    except ConfigurationError:  # reported by settings.variables
        return ""


def mpi() -> Finding:
    """mpi4py, the MPI library that it uses, and its support for threads."""
    try:
        found = importlib.util.find_spec("mpi4py")
    except (ImportError, ValueError):
        found = None
    if found is None:
        fact = "mpi4py is not installed: needed only for the backend mpi and mpi://"
        return fail(fact, "pip install 'shoal[mpi]'") if _backend() == "mpi" else ok(fact)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OF_MPIEXEC)}
    try:
        facts = call("mpi", environ=environ)
    except ChildFailed as error:
        reason = str(error).removeprefix("shoal.errors.ConfigurationError: ")
        return _needed("mpi", warn(
            f"the backend mpi cannot be used: {reason}",
            "install an MPI library (pip install mpich, or apt install openmpi-bin), and set MPI4PY_LIBMPI "
            "to its libmpi.so if mpi4py does not find it",
        ))  # fmt: skip
    fact = f"{facts['library']} ({facts['file']}), {facts['threads']}, mpi4py {facts['mpi4py']}"
    path = shutil.which("mpiexec")
    if path is None:
        return ok(f"{fact}, no mpiexec on PATH")
    starter, fact = _library_of(path), f"{fact}, {path}"
    if starter and not facts["library"].startswith(starter):
        return _needed("mpi", warn(
            f"{fact} of {starter}: ranks that it starts do not find each other",
            f"put the mpiexec of {facts['library']} first on PATH, or set MPI4PY_LIBMPI to that libmpi.so",
        ))  # fmt: skip
    return ok(fact)


def _library_of(mpiexec: str) -> str:
    """The MPI library that ``mpiexec`` belongs to; "" if unknown."""
    try:
        shown = subprocess.run(
            [mpiexec, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "prterun": "Open MPI", "HYDRA": "MPICH"}
    return next((name for word, name in words.items() if word in shown), "")


def cuda() -> Finding:
    """The driver, the build of torch, and whether they fit."""
    try:
        driver = call("cuda_driver")
    except ChildFailed as error:
        return _needed("nccl", warn(
            f"the CUDA driver cannot be loaded: {error}", "install the NVIDIA driver again"
        ))  # fmt: skip
    facts = torch_facts()
    if isinstance(facts, str):
        return ok("not checked, because torch cannot be imported")
    supported = (
        f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no NVIDIA driver"
    )
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "ROCm" if facts["hip"] else "CPUs"
    fact = f"{supported}; torch is built for {build}"
    if facts["devices"]:
        return ok(
            f"{fact}; {counted(len(facts['devices']), 'device')}: {', '.join(sorted(set(facts['devices'])))}"
        )
    if driver and not facts["cuda"]:
        return _needed("nccl", warn(f"{fact}, so it does not use the GPU", _CUDA_WHEEL))
    if driver and facts["cuda"]:
        reason = (
            facts["warning"] or f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
        return _needed("nccl", warn(f"{fact}, but it finds no device ({reason})", _CUDA_WHEEL))
    if _backend() == "nccl":
        return fail(f"{fact}, and SHOAL_BACKEND is nccl", "unset SHOAL_BACKEND, or run on a host with a GPU")
    return ok(f"{fact}: needed only for CUDA tensors")


def nccl() -> Finding:
    """The file and version of NCCL that is loaded, and nccl4py."""
    facts = torch_facts()
    if isinstance(facts, str) or not facts["cuda"]:
        return ok("NCCL is not used, because torch has no CUDA")
    try:
        binding = metadata.version("nccl4py")
    except metadata.PackageNotFoundError:
        fact = "nccl4py is not installed: needed only for the backend nccl"
        return fail(fact, "pip install 'shoal[nccl]'") if _backend() == "nccl" else ok(fact)
    try:
        found = call("nccl")
    except ChildFailed as error:
        return _needed("nccl", warn(f"the backend nccl cannot be used: {error}", "pip install 'shoal[nccl]'"))
    fact = f"NCCL {found['version']} ({', '.join(found['files']) or 'linked into torch'}), nccl4py {binding}"
    if len(found["files"]) > 1 or found["version"] != found["torch"]:
        return _needed("nccl", warn(
            f"{fact}; torch uses NCCL {found['torch']}, so a process would have two of them",
            "keep one: remove directories with another libnccl.so from LD_LIBRARY_PATH, and install the "
            "nvidia-nccl package that torch requires",
        ))  # fmt: skip
    return ok(fact)


def nccl_variables() -> list[Finding]:
    """Variables that contradict each other, shoal, or this host's interfaces."""
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_")))
    if not names:
        return [ok("no variables of NCCL or Gloo are set")]

    def value(name: str, default: str = "") -> str:
        return os.environ.get(name, default)

    found = []
    if value("NCCL_COMM_BLOCKING", "0") not in ("0", ""):
        found.append(_needed("nccl", warn(
            "NCCL_COMM_BLOCKING is set, which the backend nccl refuses", "unset NCCL_COMM_BLOCKING"
        )))  # fmt: skip
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if (text := value(name)) and not _matches_interface(text, exact=name.startswith("GLOO")):
            found.append(warn(
                f"{name}={text!r} matches no interface of this host ({', '.join(psutil.net_if_addrs())})",
                f"set {name} to one of them, or unset it",
            ))  # fmt: skip
    if value("NCCL_P2P_DISABLE") == value("NCCL_SHM_DISABLE") == "1":
        found.append(warn(
            "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE are both set: GPUs of one host communicate over sockets",
            "unset both unless you are looking for a fault in one of them",
        ))  # fmt: skip
    if value("NCCL_NET").upper() == "IB" and value("NCCL_IB_DISABLE") == "1":
        found.append(warn("NCCL_NET=IB contradicts NCCL_IB_DISABLE=1", "unset one of them"))
    return found or [ok("set: " + ", ".join(f"{name}={os.environ[name]}" for name in names))]


def _matches_interface(text: str, *, exact: bool) -> bool:
    """Whether a list of prefixes, or of names (after "="), without some (after "^"), leaves an interface."""
    excludes, text = text.startswith("^"), text.removeprefix("^")
    exact, text = exact or text.startswith("="), text.removeprefix("=")
    words = [word.partition(":")[0] for word in text.split(",")]

    def named(interface: str) -> bool:
        return interface in words if exact else interface.startswith(tuple(words))

    return any(named(each) != excludes for each in psutil.net_if_addrs())
