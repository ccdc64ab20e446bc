"""The environment variables of the supported launchers.

:func:`read` converts shoal's own variables and those of torchrun, Slurm, Open MPI, MPICH and Kubernetes to
one form, :class:`Launch`. The innermost launcher comes first: ``torchrun`` may run under Slurm or in a pod,
and ``mpirun`` starts its helpers through ``srun``, whose variables its ranks inherit.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .. import config
from ..errors import ConfigurationError
from ..net import format_address
from .slurm_nodelist import first_host

#: Derived ports are below Linux's range of ephemeral ports (32768 and up), so that outgoing connections of
#: other programs do not use them.
DERIVED_PORTS = range(20000, 30000)

#: the index of a pod in an Indexed Job
_INDEX = "JOB_COMPLETION_INDEX"

_PASSED_ON = f": mpiexec -x {config.STORE.name}=tcp://FIRST-HOST:29400 -x {config.SECRET_FILE.name}=PATH"


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of one process in its job, as its launcher describes it.

    Attributes:
        launcher: its name, for messages.
        rank, size: None: determined by the store.
        local_rank, local_size: None: determined from the hosts of all ranks.
        job, epoch: the job, and the number of its restarts.
        url: of the rendezvous; None: all ranks are on this host and meet in a private file.
        rank_variable: a variable that every rank has in its environment, but the launcher itself has not.
    """

    launcher: str
    rank: int | None
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None
    job: str = config.JOB.default
    epoch: int = 0
    url: str | None = None
    rank_variable: str = ""


class _VariableReader:
    """Typed access to the variables of one launcher; errors name the launcher and the variable."""

    def __init__(self, launcher: str, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.environ = environ

    def text(self, *names: str) -> str | None:
        """Return the first of the variables that is set, or None."""
        return next((value for name in names if (value := self.environ.get(name, "").strip())), None)

    def number(self, *names: str) -> int | None:
        """Return the first of the variables that is set, as a number from 0, or None."""
        text = self.text(*names)
        if text is None:
            return None
        if not text.isdecimal():
            raise ConfigurationError(
                f"{self.launcher} set {names[0]}={text!r}: expected a whole number from 0"
            )
        return int(text)

    def need(self, *names: str) -> int:
        """Like :meth:`number`, but raise if none of the variables is set."""
        number = self.number(*names)
        if number is None:
            raise ConfigurationError(
                f"the environment looks like {self.launcher}'s, but {' or '.join(names)} is not set; "
                f"unset {self.launcher}'s variables, or give shoal.init a url, rank and size"
            )
        return number

    def master_url(self) -> str | None:
        """Return ``tcp://MASTER_ADDR:MASTER_PORT`` if both are set."""
        address, port = self.text("MASTER_ADDR"), self.number("MASTER_PORT")
        if address is None or port is None:
            return None
        return tcp_url(address, port)


def read(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that ``environ`` describes; None without variables of a launcher.

    ``SHOAL_STORE``, ``SHOAL_JOB`` and ``SHOAL_EPOCH`` override the variables of other launchers.

    Raises:
        ConfigurationError: a variable is malformed or missing; the message names it.
    """
    launch = _parsed(environ)
    if launch is None:
        if half := {"RANK", "WORLD_SIZE"} & {name for name, value in environ.items() if value.strip()}:
            # Otherwise each process would silently train alone.
            missing = "WORLD_SIZE" if "RANK" in half else "RANK"
            raise ConfigurationError(f"{half.pop()} is set, but {missing} is not: set both, or neither")
        return None
    url = config.STORE.get(environ)
    epoch = config.EPOCH.get(environ) if environ.get(config.EPOCH.name, "").strip() else launch.epoch
    launch = replace(launch, url=url or launch.url, job=_chosen_job(environ) or launch.job, epoch=epoch)
    _check(launch)
    return launch


def job_name(environ: Mapping[str, str]) -> str:
    """Return the name of the job, like :func:`read`, but also if the launcher's variables are incomplete."""
    if job := _chosen_job(environ):
        return job
    with contextlib.suppress(ConfigurationError):
        if (launch := _parsed(environ)) is not None:
            return launch.job
    return config.JOB.default


def _parsed(environ: Mapping[str, str]) -> Launch | None:
    """Return what the first launcher with variables in ``environ`` describes."""
    return next((found for parse in _LAUNCHERS if (found := parse(environ)) is not None), None)


def _chosen_job(environ: Mapping[str, str]) -> str:
    """Return SHOAL_JOB; "": it is not set."""
    return config.JOB.get(environ) if environ.get(config.JOB.name, "").strip() else ""


def read_mpi(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch by mpiexec or srun; None if neither started this process.  Raises as :func:`read`.

    It need not name a place where the ranks meet.
    """
    parsers = (_open_mpi, _mpich, _slurm)
    return next((found for parse in parsers if (found := parse(environ)) is not None), None)


def names_store(environ: Mapping[str, str]) -> bool:
    """Return whether ``SHOAL_STORE``, or ``MASTER_ADDR`` and ``MASTER_PORT``, name a store."""
    return any(
        all(environ.get(name, "").strip() for name in names)
        for names in ((config.STORE.name,), ("MASTER_ADDR", "MASTER_PORT"))
    )


def _check(launch: Launch) -> None:
    if launch.rank is not None and launch.size is not None and launch.rank >= launch.size:
        raise ConfigurationError(
            f"{launch.launcher} gives this process rank {launch.rank} in a job of size {launch.size}; "
            f"ranks go from 0 to {launch.size - 1}"
        )
    if launch.url is None and (launch.size is None or launch.size > 1) and not launch.rank_variable:
        passed_on = _PASSED_ON if launch.launcher == "Open MPI" else ""
        if launch.launcher in ("Open MPI", "MPICH"):
            passed_on += "; or, with mpi4py, give shoal.init the url mpi://, which needs no variable"
        raise ConfigurationError(
            f"{launch.launcher} gives rank and size but not where the ranks meet: set {config.STORE.name} "
            "(tcp://host:port or file:///path), or MASTER_ADDR and MASTER_PORT, the same on every rank"
            + passed_on
        )


def _shoal(environ: Mapping[str, str]) -> Launch | None:
    rank, size = config.RANK.get(environ), config.SIZE.get(environ)
    if (rank is None and size is None) or _is_of_kubernetes(environ, rank, size):
        return None
    return _by_shoal(environ, rank, size)


def _is_of_kubernetes(environ: Mapping[str, str], rank: int | None, size: int | None) -> bool:
    """Return whether the index of an Indexed Job is the rank (unless a launcher in the pod sets one).

    The pods of an Indexed Job may also be independent. So the index is a rank only if a size is given and no
    rank; and with size 1 only for index 0, as there may be many groups of one.
    """
    index = environ.get(_INDEX, "").strip()
    return rank is None and size is not None and (size > 1 or index == "0") and bool(index)


def _kubernetes(environ: Mapping[str, str]) -> Launch | None:
    reader = _VariableReader("Kubernetes", environ)
    if not _is_of_kubernetes(environ, config.RANK.get(environ), config.SIZE.get(environ)):
        return None
    return replace(
        _by_shoal(environ, reader.need(_INDEX), config.SIZE.get(environ)), launcher=reader.launcher
    )


def _dynamic(environ: Mapping[str, str]) -> Launch | None:
    """A launch with nothing but a store, which determines the rest."""
    return None if config.STORE.get(environ) is None else _by_shoal(environ, None, None)


def _by_shoal(environ: Mapping[str, str], rank: int | None, size: int | None) -> Launch:
    return Launch(
        "shoal's environment", rank, size, config.LOCAL_RANK.get(environ), config.LOCAL_SIZE.get(environ)
    )


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    reader = _VariableReader("torchrun", environ)
    if reader.text("RANK") is None or reader.text("WORLD_SIZE") is None:
        return None
    rank, size = reader.need("RANK"), reader.need("WORLD_SIZE")
    run, local_size = reader.text("TORCHELASTIC_RUN_ID"), reader.number("LOCAL_WORLD_SIZE")
    url, rank_variable = reader.master_url(), ""
    if reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent's own store listens on MASTER_PORT and uses another protocol.
        if local_size == size:
            url, rank_variable = None, "RANK"
        else:
            address = reader.text("MASTER_ADDR")
            seed = f"torchrun/{run}/{reader.text('MASTER_PORT')}"
            url = tcp_url(address, derived_port(seed)) if address is not None else None
    return Launch(
        reader.launcher,
        rank,
        size,
        reader.number("LOCAL_RANK"),
        local_size,
        job=config.JOB.default if run in (None, "none") else f"torchrun-{run}",
        epoch=reader.number("TORCHELASTIC_RESTART_COUNT") or 0,
        url=url,
        rank_variable=rank_variable,
    )


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    reader = _VariableReader("Open MPI", environ)
    if reader.text("OMPI_COMM_WORLD_RANK") is None:
        return None
    job = reader.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _mpi(reader, "OMPI_COMM_WORLD_", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), job)


def _mpich(environ: Mapping[str, str]) -> Launch | None:
    reader = _VariableReader("MPICH", environ)
    # srun sets PMI_RANK too, but only the process managers of MPICH set the local rank.
    if reader.text("PMI_RANK") is None or (
        reader.text("SLURM_STEP_ID") is not None and reader.text("MPI_LOCALRANKID") is None
    ):
        return None
    job = reader.text("PMI_JOBID", "PMI_KVS")
    return _mpi(reader, "", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), job)


def _mpi(reader: _VariableReader, prefix: str, names: tuple[str, str, str, str], job: str | None) -> Launch:
    """Return the launch by MPI; ``names``: the variables of rank, size, local rank and local size."""
    rank, size, local_rank, local_size = (prefix + name for name in names)
    launch = Launch(
        reader.launcher, reader.need(rank), reader.need(size), reader.number(local_rank),
        reader.number(local_size), job=config.JOB.default if job is None else f"mpi-{job}",
        url=reader.master_url(),
    )  # fmt: skip
    on_one_host = launch.url is None and launch.local_size == launch.size
    return replace(launch, rank_variable=rank) if on_one_host else launch


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    reader = _VariableReader("Slurm", environ)
    # A batch script has SLURM_PROCID=0 as well, but no step: it is a single process, not a rank.
    step = reader.text("SLURM_STEP_ID", "SLURM_STEPID")
    batch = step is None and reader.text("ENVIRONMENT") == "BATCH"
    if batch or reader.text("SLURM_PROCID") is None:
        return None
    size = reader.need("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = reader.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    one_host = reader.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") == 1
    job = f"slurm-{reader.text('SLURM_JOB_ID', 'SLURM_JOBID')}.{step or 0}"
    url = None if one_host else reader.master_url()
    if not one_host and url is None and nodes is not None:
        try:
            url = tcp_url(first_host(nodes), derived_port(job))
        except ValueError as error:
            raise ConfigurationError(f"Slurm's SLURM_STEP_NODELIST cannot be read: {error}") from None
    return Launch(
        reader.launcher,
        reader.need("SLURM_PROCID"),
        size,
        reader.number("SLURM_LOCALID"),
        size if one_host else None,
        job=job,
        epoch=reader.number("SLURM_RESTART_COUNT") or 0,
        url=url,
        rank_variable="SLURM_PROCID" if one_host else "",
    )


#: in order of precedence: the innermost launcher first
_LAUNCHERS = (_shoal, _torchrun, _open_mpi, _mpich, _slurm, _kubernetes, _dynamic)


def derived_port(seed: str) -> int:
    """Return a port that every process derives in the same way from ``seed``."""
    return DERIVED_PORTS[zlib.crc32(seed.encode()) % len(DERIVED_PORTS)]


def tcp_url(host: str, port: int) -> str:
    """Return ``tcp://host:port``, with brackets around an IPv6 address."""
    return f"tcp://{format_address(host, port)}"
