"""The MPI library of this process.  The only module that imports mpi4py and initialises MPI.

:func:`mpi` does both on its first call, so that programs without MPI need neither mpi4py nor a library.
MPI is finalised when the interpreter exits, unless :func:`mark_broken` was called or an uncaught exception
ends the program: ``MPI_Finalize`` waits for the other ranks, also for lost ones.  A program that imports
``mpi4py.MPI`` first has initialised MPI itself, and then mpi4py finalises it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any

from ..errors import ConfigurationError

_lock = threading.Lock()
_module: Any = None
#: process that called :func:`mpi` first
_owner = 0
#: whether this module has initialised MPI, and so must finalise it
_initialized_here = False
_broken = False


def mpi() -> Any:
    """Return the module ``mpi4py.MPI``; MPI is initialised for calls from several threads at once.

    Raises:
        ConfigurationError: mpi4py or an MPI library is missing, MPI was initialised for one thread only or is
            already finalised, or the process is a fork of one that uses MPI.
    """
    global _module, _owner, _initialized_here
    if _owner not in (0, os.getpid()):
        raise ConfigurationError(
            "this process was forked after MPI was initialised, and MPI works only in its parent: start it "
            "with mpiexec, or use the multiprocessing start method 'spawn' and another backend"
        )
    with _lock:
        if _module is None:
            module, _initialized_here = _load()
            _check(module)
            _owner = os.getpid()
            _module = module
        if _module.Is_finalized():
            raise ConfigurationError("MPI was finalised in this process; use shoal before that")
        return _module


def _load() -> tuple[Any, bool]:
    """Import mpi4py and initialise MPI; return the module, and whether MPI was initialised here."""
    try:
        rc = import_module("mpi4py").rc
    except ImportError as error:
        raise ConfigurationError("MPI needs mpi4py: pip install 'shoal[mpi]'") from error
    imported = "mpi4py.MPI" in sys.modules
    if not imported:
        # Not by mpi4py, which would call MPI_Finalize at exit in any case.
        rc.initialize = False
        rc.finalize = False
    try:
        module: Any = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            "mpi4py found no MPI library: pip install mpich, or install one of the system (Debian: "
            "apt install openmpi-bin).  For a library elsewhere, set MPI4PY_LIBMPI to the path of its "
            f"libmpi.so.  {' '.join(str(error).split())}"
        ) from error
    if module.Is_initialized() or module.Is_finalized():
        return module, False
    _check_launcher(module)
    _ignore_death_signal()
    module.Init_thread(module.THREAD_MULTIPLE)
    return module, True


def _check_launcher(module: Any) -> None:
    """Raise ConfigurationError if MPICH would end this process, because Open MPI's mpiexec has started it."""
    name = library_name(module)
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or "PMI_SIZE" in os.environ:
        return
    if name.startswith(("MPICH", "MVAPICH", "Intel")):
        raise ConfigurationError(f"this process was started by an mpiexec of Open MPI, but {_advice(name)}")


def _ignore_death_signal() -> None:
    """Ignore SIGUSR1 under an mpiexec of MPICH, which sends it to the other ranks when a rank dies.

    It does with -disable-auto-cleanup, and the default action would end the ranks that are to continue.
    """
    if (
        "PMI_RANK" in os.environ
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _advice(library: str) -> str:
    return (
        f"mpi4py uses {library}: start all ranks with one mpiexec of {library}, or, for an mpiexec of "
        "another library, set MPI4PY_LIBMPI to the path of that library's libmpi.so"
    )


def _check(module: Any) -> None:
    if not module.Is_finalized() and module.Query_thread() != module.THREAD_MULTIPLE:
        raise ConfigurationError(
            f"{library_name(module)} was initialised without THREAD_MULTIPLE, but shoal calls it from "
            'several threads: remove mpi4py.rc.threads and mpi4py.rc.thread_level (default "multiple") from '
            "the program, or build the library with support for threads"
        )


def library_name(module: Any) -> str:
    """Return name and version of the library that ``module`` uses, such as ``MPICH 5.0.2``."""
    first = str(module.Get_library_version()).strip().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def check_world(rank: int | None, size: int | None, source: str) -> None:
    """Check that this process has this rank and size in ``MPI.COMM_WORLD``.

    Args:
        rank, size: expected values; None: any.
        source: subject of the message that has given them, such as "Slurm".

    Raises:
        ConfigurationError: it has not, mostly because mpiexec belongs to another MPI library.
    """
    world = mpi().COMM_WORLD
    if rank in (None, world.rank) and size in (None, world.size):
        return
    given = {"rank": (rank, world.rank), "size": (size, world.size)}
    expected = " and ".join(f"{what} {mine}" for what, (mine, _) in given.items() if mine is not None)
    found = " and ".join(f"{what} {its}" for what, (mine, its) in given.items() if mine is not None)
    raise ConfigurationError(
        f"{source} gives this process {expected}, but in MPI.COMM_WORLD it has {found}; "
        f"{_advice(library_name(mpi()))}"
    )


def mark_broken() -> None:
    """Skip ``MPI_Finalize`` at exit, because ranks are lost or operations are incomplete."""
    global _broken
    _broken = True


# Registered when this module is imported, which is before that of shoal.world: handlers run in reverse order,
# so MPI is finalised after all groups are closed.
@atexit.register
def finalize() -> None:
    """Finalise MPI if it was initialised here and no rank is lost; waits for the other ranks."""
    if _broken or not _initialized_here or _owner != os.getpid() or _module.Is_finalized():
        return
    if getattr(sys, "last_exc", None) or getattr(sys, "last_value", None):
        return  # an uncaught exception: mpiexec now ends the other ranks, for which MPI_Finalize would wait
    _module.Finalize()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old lock


os.register_at_fork(after_in_child=_after_fork_in_child)
