"""``shoal run --hosts`` and ``--srun``: the environment of other hosts, and the start of a job there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import click

from ... import config
from ...common.formatting import counted, encodable
from ...errors import LaunchError, UsageError
from ..agent_protocol import Preload
from ..job.job_store import ExitNotifier, job_store
from ..job.launch import JobOutcome, JobStart, LaunchOptions, run_with_restarts
from ..job.signals import Signals, Stopped
from ..job.supervisor import Supervisor
from ..ranks.environment import Job
from ..remote.agent_pool import AgentPool
from ..remote.hosts import Host
from ..remote.rank_launcher import RemoteRankLauncher
from ..remote.ssh import command
from ..slurm import srun
from ..slurm.agent_pool import SrunAgentPool

#: variables passed on to other hosts in addition to those of shoal
PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")
#: variables of shoal that are valid on one host only, or that the launcher sets for each rank
_HOST_VARIABLES = {
    variable.name
    for variable in (
        config.SSH, config.INTERFACE, config.HOST_ID, config.REPORT_FD, config.SECRET, config.SECRET_FILE,
        config.JOIN,
    )
}  # fmt: skip
#: seconds within which Slurm sends a signal to all processes of a job, on all nodes
_SETTLE_S = 0.3
#: exit code if a host could not be used, or a rank could not be started there
_NOT_STARTED = 1


@dataclass(frozen=True)
class HostPlan:
    """The hosts of a job, and its settings there.

    Attributes:
        hosts: the hosts that have a slot.
        python: the interpreter of the agents.
        environment: variables of the ranks, in addition to those of their host.
        bind: bind each slot to its own cores.
        by_srun: start the agents by srun; the hosts are the nodes of the allocation.
        named: the variables in ``environment`` that ``--env`` names; their values may be secret.
        preload: the modules that the ranks of a host import together, if any.
    """

    hosts: Sequence[Host]
    python: str
    directory: str
    environment: Mapping[str, str]
    bind: bool
    by_srun: bool = False
    named: Sequence[str] = ()
    preload: Preload | None = None


def passed_on(names: Sequence[str], extra: Mapping[str, str], *, store: bool) -> dict[str, str]:
    """The variables of this process's environment that ranks on other hosts get.

    Args:
        names: additional variables, of ``--env``, which exist.
        extra: variables that the launcher sets.
        store: the job uses a store given by the user; its secret is passed on too.

    Raises:
        UsageError: a value is not UTF-8.
    """
    own = _HOST_VARIABLES | set(Job(1).variables(0, "", ""))
    found = {
        k: v for k, v in os.environ.items() if k in PASSED_ON or (k.startswith("SHOAL_") and k not in own)
    }
    for name in names:
        found[name] = os.environ[name]
    if store and (secret := config.secret()):
        found["SHOAL_SECRET"] = secret.decode("utf-8", "surrogateescape")
    found = {**extra, **found}
    for name, value in found.items():
        if encodable(name + value) != name + value:
            raise UsageError(f"the variable {name} is not UTF-8, and cannot be passed on to other hosts")
    return found


def directory(chdir: str | None) -> str:
    """The working directory of ranks on other hosts; raises UsageError if its path is not UTF-8."""
    found = os.getcwd() if chdir is None else os.path.join(os.getcwd(), chdir)
    if encodable(found) != found:
        raise UsageError(f"the directory {encodable(found)} is not UTF-8: name another one by --chdir")
    return found


def fit_to_hosts(
    hosts: Sequence[Host], size: int | None, max_ranks: int | None, spares: int, *, respawn: bool = False
) -> tuple[int, list[Host]]:
    """The number of ranks at the start, and the hosts that are used; ``size`` None: as many as fit.

    With ``respawn`` all hosts are used, to have slots for the ranks of a lost host.  Raises UsageError if
    there are too few slots.
    """
    slots = sum(host.slots for host in hosts)
    size = slots - spares if size is None else size
    needed = max(size, max_ranks or 0) + spares
    if size < 1 or needed > slots:
        kinds = [counted(max(size, max_ranks or 0), "rank"), *([counted(spares, "spare")] if spares else [])]
        raise UsageError(
            f"{' and '.join(kinds)} do not fit into {counted(slots, 'slot')} of {counted(len(hosts), 'host')}"
        )
    return size, [host for host in hosts if respawn or host.first < needed]


def describe(plan: HostPlan, job: Job, argv: Sequence[str], store: str | None) -> str:
    """The text that ``--dry-run`` prints."""
    url, secret = (store, {}) if store else ("tcp://<address>:<port>", {"SHOAL_SECRET": "<secret>"})
    lines = [f"in {plan.directory}, environment of each rank, in addition to the variables of its host:"]
    hidden = dict.fromkeys(plan.named, "<passed on>")
    hidden |= {"SHOAL_SECRET": "<secret>", "SHOAL_STORE_PASSWORD": "<secret>"}
    lines += [f"  {k}={hidden.get(k, v)}" for k, v in plan.environment.items()]
    if plan.by_srun:
        lines.append(shlex.join(srun.command(plan.hosts, plan.python, ":<port>")))
    for host in plan.hosts:
        how = "" if plan.by_srun else f" {shlex.join(command(host, plan.python))}"
        lines.append(f"host {host.name}:{how}")
        count = host.initial_ranks(job.size)
        for slot in range(host.first, host.first + count):
            variables = job.variables(
                slot, url, "<port>", master="<address>", local=(slot - host.first, count)
            )
            variables |= {**secret, "SHOAL_JOB": "<job>", config.REPORT_FD.name: "<descriptor>"}
            own = " ".join(f"{k}={v}" for k, v in variables.items())
            lines.append(f"  rank {slot}: {own} {shlex.join(argv)}")
        if host.slots > count:
            lines.append(f"  {counted(host.slots - count, 'slot')} left for spares and processes that join")
    return "\n".join(lines)


def _pool(plan: HostPlan, signals: Signals) -> AgentPool:
    if plan.by_srun:
        return SrunAgentPool(plan.hosts, plan.python, signals, hidden=_HOST_VARIABLES)
    return AgentPool(plan.hosts, plan.python, signals)


def launch_on_hosts(plan: HostPlan, argv: Sequence[str], job: Job, options: LaunchOptions) -> int:
    """Run ``argv`` on the ranks of ``job``; return the exit code.  Must be called on the main thread.

    Raises:
        UsageError, StoreError, RendezvousError: the store cannot be opened.
    """

    def run_once(start: JobStart) -> JobOutcome:
        job = start.job
        with ExitStack() as steps:
            try:
                # Before the agents start: opening a store may take long, without heartbeats to them.
                store = options.store
                named = None if store is None else steps.enter_context(job_store(store, job))
                pool = steps.enter_context(closing(_pool(plan, start.signals)))
                pool.connect()
                addresses = pool.launcher_addresses()
                counts = [host.initial_ranks(job.size) for host in plan.hosts]
                pool.begin(plan.directory, plan.environment, counts, bind=plan.bind, preload=plan.preload)
                meeting_place = named or steps.enter_context(job_store(None, job, addresses))
                notes = ExitNotifier(meeting_place.connect, job.ident, job.epoch)
                steps.enter_context(closing(notes))
                hello = pool.agents[0].hello
                assert hello is not None
                rank_launcher = RemoteRankLauncher(
                    pool,
                    argv,
                    job,
                    stores=[meeting_place.url_at(address) for address in addresses],
                    master=pool.master_address(),
                    master_port=str(hello.port),
                    max_ranks=options.max_ranks or job.size,
                )
                supervisor = steps.enter_context(closing(Supervisor(start, rank_launcher, notes)))
                meeting_place.start()
                supervisor.start()
            except Stopped as stopped:
                return JobOutcome(128 + stopped.number)
            except LaunchError as error:
                return JobOutcome(_print_failure(error))
            return supervisor.run()

    try:
        return run_with_restarts(job, options, run_once, settle=_SETTLE_S if plan.by_srun else 0.0)
    except LaunchError as error:
        return _print_failure(error)


def _print_failure(error: LaunchError) -> int:
    click.echo(f"shoal: {error}", err=True)
    return _NOT_STARTED
