"""``shoal run``: several ranks of one program, on this machine or on several hosts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ... import config
from ...common.wording import counted, named
from ..job.crew import LocalCrew
from ..job.job_store import job_store
from ..job.restarts import JobOutcome, run_with_restarts
from ..job.signals import Signals
from ..job.supervisor import STOP_GRACE, Supervisor
from ..output.logs import Logs
from ..output.sink import is_terminal
from ..ranks.cores import shares, usable
from ..ranks.environment import OF_RANKS, Job, ReservedPort, defaults
from ..ranks.guardian import Guardian
from ..ranks.notes import Notes
from ..ranks.program import resolve
from ..remote.hosts import Host, parse_hosts, read_hostfile
from ..slurm.allocation import allocation
from .encryption import demand_tls
from .on_hosts import HostPlan, describe, directory, fitted, launch_on_hosts, passed_on

#: longest --grace in seconds: a day
MOST_GRACE_S = 86400.0


def _number_of_ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    if value == "auto":
        return len(os.sched_getaffinity(0))
    if value == "p":
        raise click.BadParameter("-np is spelled -n here: shoal run -n 2 ...")
    if not value.isdecimal() or not int(value):
        raise click.BadParameter(f"{value!r} is neither a whole number from 1 nor auto")
    return int(value)


def _checked_grace(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not 0.0 <= value <= MOST_GRACE_S:  # nor NaN
        raise click.BadParameter(f"{value} is not a number of seconds from 0 to {MOST_GRACE_S:.0f}")
    return value


class _Run(click.Command):
    """Answers options of other launchers with the name of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = _MEANT.get(error.option_name.replace("_", "-"))
            if meant is None:
                raise
            raise click.UsageError(f"No such option: {error.option_name}; {meant}", ctx) from None


_NUMBER = "the number of ranks is -n N, or -n auto for one on each core"
_HOSTS = "several hosts are --hosts h1:4,h2:4, or within Slurm --srun"
_NO_ADDRESS = "shoal run finds the addresses by itself; leave it out"
_USUAL_TERMINAL = os.terminal_size((80, 24))
#: options of torchrun, mpiexec, accelerate and srun -> what to write
_MEANT = {
    **dict.fromkeys(("--nproc-per-node", "--np", "--nprocs", "--num-processes", "--ntasks"), _NUMBER),
    **dict.fromkeys(("--nnodes", "--node-rank", "--host", "--machinefile"), _HOSTS),
    **dict.fromkeys(
        ("--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--standalone"), _NO_ADDRESS
    ),
    "--bind-to": "ranks are bound to cores by --bind",
    "--cpu-bind": "ranks are bound to cores by --bind",
    "--log-directory": "the directory for a file a rank is --log-dir DIR",
    "--enable-recovery": "the other ranks go on with --min N",
    "--no-python": "any program may be run; leave it out",
}


def _complete_command(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command(
    cls=_Run,
    context_settings={"allow_interspersed_args": False},
    short_help="Run several ranks of a program, here or on several hosts.",
)
@click.option(
    "-n",
    "--ranks",
    "size",
    metavar="NUMBER",
    callback=_number_of_ranks,
    help="Number of ranks, or auto: one on each core that may be used.  [default: 1, or the hosts' slots]",
)
@click.option(
    "--hosts",
    metavar="HOST:SLOTS,...",
    help="Run ranks on these hosts, which ssh reaches without a password: h1:4,h2:4. localhost is this one.",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The same from a file with lines h1:4 or h1 slots=4.",
)
@click.option(
    "--srun",
    is_flag=True,
    help="Run ranks on the nodes of this allocation of Slurm, as many on each as the job has tasks there.",
)
@click.option(
    "--python", metavar="PATH", help="With --hosts or --srun: the interpreter there.  [default: this one]"
)
@click.option(
    "--chdir",
    metavar="DIR",
    help="With --hosts or --srun: the directory in which ranks run.  [default: this one]",
)
@click.option(
    "--env",
    "names",
    metavar="NAME",
    multiple=True,
    help="With --hosts: pass this variable on too, beside those of shoal, PYTHONPATH and OMP_NUM_THREADS; "
    "may be repeated.",
)
@click.option(
    "--min",
    "least",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="Go on when ranks fail, while at least so many live or have finished; without it all end with the "
    "first. COMMAND must know what to do then: see group.rebuild.",
)
@click.option(
    "--respawn",
    is_flag=True,
    help="With --min: start another process in the place of a rank that failed. It has no rank, and "
    "SHOAL_JOIN=1: see elastic.Session.",
)
@click.option(
    "--max",
    "most",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="With --min: let shoal scale have up to so many processes run. Those beyond -n have no rank, and "
    "SHOAL_JOIN=1.",
)
@click.option(
    "--spares",
    metavar="NUMBER",
    type=click.IntRange(min=0),
    default=0,
    help="With --min: start so many processes beyond -n, which have no rank, and SHOAL_JOIN=1. A session "
    "holds them back until a rank dies, whose place one of them takes: see elastic.Session.",
)
@click.option(
    "--max-restarts",
    "restarts",
    metavar="NUMBER",
    type=click.IntRange(min=0),
    default=0,
    help="Start all ranks again after one has failed, at most NUMBER times. SHOAL_EPOCH counts the starts, "
    "from 0. Not with --min.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=float,
    callback=_checked_grace,
    default=STOP_GRACE,
    help="Seconds from SIGTERM or Ctrl-C, which are passed on to the ranks, to SIGKILL.  [default: 30]",
)
@click.option("-m", "module", is_flag=True, help="COMMAND is a module, run as python -m does.")
@click.option(
    "--log-dir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write what rank N says, stdout and stderr, to DIR/rankN.log too, in the place of an older one; "
    "and what the launcher says to DIR/launcher.log.",
)
@click.option(
    "--store",
    metavar="URL",
    help="Let the ranks meet in this store (tcp://host:port, file:///path, or a registered scheme), in "
    "the place of one that the launcher serves. Its secret is SHOAL_SECRET.",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt the connections to the store, with TLS 1.3: SHOAL_TLS=1 for the launcher and the ranks.",
)
@click.option("--no-prefix", is_flag=True, help="Write lines without their rank.")
@click.option(
    "--bind",
    is_flag=True,
    help="Give each rank cores of its own, equally many; with fewer cores than ranks, one core, shared.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=_complete_command)
def run(
    size: int | None,
    hosts: str | None,
    hostfile: Path | None,
    srun: bool,
    python: str | None,
    chdir: str | None,
    names: tuple[str, ...],
    least: int | None,
    respawn: bool,
    most: int | None,
    spares: int,
    restarts: int,
    grace: float,
    module: bool,
    log_dir: Path | None,
    store: str | None,
    tls: bool,
    no_prefix: bool,
    bind: bool,
    dry_run: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND (a Python script or module, or a program) with its arguments, once for each rank.

    The first word that is not an option is the command; what follows it goes to the command
    untouched. The exit code is that of the rank that failed first (128 and the number of the
    signal, if one killed it), or 0; with --min also if ranks failed and the others finished.
    """
    slots = _slots(hosts, hostfile)
    given = None
    if srun:
        if slots is not None:
            raise click.UsageError(
                "--srun takes the hosts of the allocation: leave out --hosts and --hostfile"
            )
        given = allocation(os.environ)
        slots = list(given.hosts)
    if slots is None and (python or chdir or names):
        raise click.UsageError("--python, --chdir and --env need --hosts, --hostfile or --srun")
    if slots is not None:
        size, slots = fitted(slots, size, most, spares, respawn=respawn)
    size = size or 1
    if least is not None and least > size:
        raise click.BadParameter(f"{least} of {counted(size, 'rank')}", param_hint="'--min'")
    if respawn and least is None:
        raise click.UsageError("--respawn needs --min N: how many ranks must go on while another one starts")
    if most is not None and least is None:
        raise click.UsageError("--max needs --min N: how many ranks must go on whatever shoal scale asks for")
    if most is not None and most < size:
        raise click.BadParameter(f"{most}, but -n is {size}", param_hint="'--max'")
    if spares and least is None:
        raise click.UsageError("--spares needs --min N: how many ranks must go on until a spare has come")
    if restarts and least is not None:
        raise click.UsageError(
            "--max-restarts starts the whole job again, so it does not go with --min, where the other ranks "
            "go on; --respawn replaces the ranks that failed"
        )
    argv = resolve(command, module=module, python=python or "", elsewhere=chdir is not None)
    # Nothing but what is passed on comes to other hosts: there the launcher's defaults hold.
    inherited = {k: v for k, v in os.environ.items() if slots is None or k == "NO_COLOR"}
    extra = defaults(size, inherited, _terminal(), prefixed=not no_prefix)
    if tls:
        demand_tls(store)
        extra[config.TLS.name] = "1"
    config.check_values({**os.environ, **Job(size, spares).variables(0, "", "")})
    if slots is not None:
        # How the cores of a host are shared is known there.
        shown = {k: v for k, v in extra.items() if k != "OMP_NUM_THREADS"}
        plan = HostPlan(
            slots,
            python or sys.executable,
            directory(chdir),
            {**(given.kept if given else {}), **passed_on(names, shown, store=store is not None)},
            bind,
            by_srun=srun,
            named=names,
        )
        epoch = given.restarts if given else 0
        job = Job(size, spares, epoch=epoch) if store is None else Job(size, spares, secret="", epoch=epoch)
        if dry_run:
            click.echo(describe(plan, job, argv, store))
            return 0
        _open_standard_files()
        return launch_on_hosts(
            plan,
            argv,
            job,
            least=least,
            respawn=respawn,
            most=most,
            restarts=restarts,
            grace=grace,
            prefixed=not no_prefix,
            log_dir=log_dir,
            store=store,
        )
    bound = shares(usable(), size) if bind else None
    if dry_run:
        click.echo(_plan(argv, Job(size, spares, secret=""), extra, bound, store, respawn))
        return 0
    return launch(
        argv,
        size,
        extra,
        least=least,
        respawn=respawn,
        most=most,
        spares=spares,
        restarts=restarts,
        grace=grace,
        bound=bound,
        prefixed=not no_prefix,
        log_dir=log_dir,
        store=store,
    )


def _slots(hosts: str | None, hostfile: Path | None) -> list[Host] | None:
    if hosts is not None and hostfile is not None:
        raise click.UsageError("--hosts and --hostfile: expected one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return None if hostfile is None else read_hostfile(hostfile)


def launch(
    argv: Sequence[str],
    size: int,
    extra: dict[str, str],
    *,
    least: int | None = None,
    respawn: bool = False,
    most: int | None = None,
    spares: int = 0,
    restarts: int = 0,
    grace: float = STOP_GRACE,
    bound: Sequence[Sequence[int]] | None = None,
    prefixed: bool = True,
    log_dir: Path | None = None,
    store: str | None = None,
) -> int:
    """Run ``argv`` on ``size`` ranks; returns the exit code.  For the main thread.

    Args:
        extra: added to the environment.
        least: so many ranks may go on when others fail; None: all end with the first that fails.
        respawn: start another process in the place of one that failed while others go on.
        most: so many processes ``shoal scale`` may ask for; None: it cannot.
        spares: so many processes beyond ``size`` wait to take the place of one that dies.
        restarts: how often all are started again after one has failed.
        grace: seconds from a SIGINT or SIGTERM that is passed on to SIGKILL.
        bound: the cores of each rank; None: all ranks run on all.
        prefixed: begin lines with their rank.
        log_dir: directory for a file for each rank.
        store: URL of the store in which they meet; None: the launcher serves one.

    Raises:
        UsageError, StoreError, RendezvousError: the store cannot be opened.
        LaunchError: a rank could not be started; none is left running.
    """
    _open_standard_files()
    job = Job(size, spares) if store is None else Job(size, spares, secret="")
    inherited = dict(os.environ)
    if job.secret:
        # The secret has one source: a file that the shell names is not it.
        inherited.pop("SHOAL_SECRET_FILE", None)
    with Signals() as signals, ExitStack() as open_logs:
        logs = None if log_dir is None else open_logs.enter_context(closing(Logs(log_dir, size)))

        def run_once(job: Job, restart: str) -> JobOutcome:
            with (
                job_store(store, job) as meeting_place,
                closing(ReservedPort()) as port,
                Guardian() as guardian,
                closing(Notes(meeting_place.connect, job.ident, job.epoch)) as notes,
            ):
                crew = LocalCrew(
                    argv,
                    job,
                    inherited | extra,
                    store=meeting_place.url,
                    master_port=str(port.number),
                    guardian=guardian,
                    most=most or size,
                    bound=bound,
                    threaded=job.epoch > 0,
                )
                supervisor = Supervisor(
                    signals,
                    crew,
                    notes,
                    least=least,
                    respawn=respawn,
                    grace=grace,
                    restart=restart,
                    scalable=most is not None,
                    prefixed=prefixed,
                    logs=logs,
                )
                with closing(supervisor):
                    supervisor.start()
                    # Threads begin here: from now on no Python runs between fork and exec.
                    meeting_place.start()
                    code = supervisor.run()
                    return JobOutcome(code, supervisor.failed)

        return run_with_restarts(job, restarts, run_once)


def _open_standard_files() -> None:
    """Make sure that descriptors 0 to 2 are open: a program that starts daemons may have closed them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _terminal() -> os.terminal_size | None:
    """The size of the terminal that shows the ranks' output, None when none does."""
    if is_terminal(1) and is_terminal(2):
        size = shutil.get_terminal_size()
        return size if size.columns > 0 else _USUAL_TERMINAL  # Python 3.10 gives 0 where nothing is known
    return None


def _plan(
    argv: Sequence[str],
    job: Job,
    extra: Mapping[str, str],
    bound: Sequence[Sequence[int]] | None,
    store: str | None,
    respawn: bool,
) -> str:
    """The text that ``--dry-run`` prints."""
    url = "tcp://127.0.0.1:<port>" if store is None else store
    secret = {"SHOAL_SECRET": "<secret>"} if store is None else {}
    ranks = [job.variables(rank, url, "<port>") for rank in range(job.size)]
    for variables in ranks:
        variables |= {**secret, "SHOAL_JOB": "<job>", config.REPORT_FD.name: "<descriptor>"}
    own_names = ("SHOAL_RANK", "SHOAL_LOCAL_RANK", "RANK", "LOCAL_RANK")
    same = {k: v for k, v in ranks[0].items() if k not in own_names}
    lines = ["each rank's environment, beside what it inherits:"]
    lines += [f"  {name}={value}" for name, value in same.items()]
    notes = {"OMP_NUM_THREADS": f"  (the machine's {counted(len(os.sched_getaffinity(0)), 'core')}, shared)"}
    lines += [f"  {name}={value}{notes.get(name, '')}" for name, value in extra.items()]
    for rank, variables in enumerate(ranks):
        own = " ".join(f"{k}={v}" for k, v in variables.items() if k not in same)
        cores = "" if bound is None else f"(on {named('core', bound[rank])}) "
        lines.append(f"rank {rank}: {cores}{own} {shlex.join(argv)}")
    without = f"the same without {', '.join(OF_RANKS)}, and with SHOAL_JOIN=1"
    if job.spares:
        lines.append(f"{counted(job.spares, 'spare')}: {without}")
    if respawn:
        lines.append(f"in the place of a rank that failed: {without}")
    return "\n".join(lines)
