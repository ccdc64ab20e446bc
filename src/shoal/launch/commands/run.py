"""``shoal run``: several ranks of one program, on this machine or on several hosts."""

from __future__ import annotations

import copy
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ... import config
from ...common.formatting import counted, format_numbers
from ..agent_protocol import Preload
from ..job.job_store import ExitNotifier, demand_tls, job_store
from ..job.launch import STOP_GRACE_S, JobOutcome, JobStart, LaunchOptions, run_with_restarts
from ..job.rank_launcher import LocalRankLauncher
from ..job.signals import Stopped
from ..job.supervisor import Supervisor
from ..metrics.endpoint import metrics_option
from ..output.line_format import LineFormat
from ..output.sink import is_terminal
from ..ranks.environment import (
    INITIAL_RANK_VARIABLES,
    Job,
    ReservedPort,
    default_variables,
    divide_cores,
    usable_cores,
)
from ..ranks.fork_server import ForkServer
from ..ranks.guardian import Guardian
from ..ranks.program import resolve
from ..remote.hosts import Host, parse_hosts, read_hostfile
from ..slurm.allocation import allocation
from .on_hosts import HostPlan, describe, directory, fit_to_hosts, launch_on_hosts, passed_on

#: maximum of --grace: a day
MAX_GRACE_S = 86400.0


def _number_of_ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    if value == "auto":
        return len(os.sched_getaffinity(0))
    if not value.isdecimal() or not int(value):
        raise click.BadParameter(f"expected an integer of at least 1, or auto; got {value!r}")
    return int(value)


def _checked_grace(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not 0.0 <= value <= MAX_GRACE_S:  # nor NaN
        raise click.BadParameter(f"expected a time from 0 to {MAX_GRACE_S:.0f} s, got {value}")
    return value


def _modules(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    found = tuple(name.strip() for name in value.split(",")) if value is not None else ()
    for name in found:
        if not all(part.isidentifier() for part in name.split(".")):
            raise click.BadParameter(f"expected names of modules, separated by commas; got {name!r}")
    return found


_HOSTS = "for several hosts, use --hosts h1:4,h2:4, or --srun in a Slurm allocation"
_NO_ADDRESS = "not needed: shoal run chooses the addresses"
_BIND = "use --bind to bind ranks to cores"
_USUAL_TERMINAL = os.terminal_size((80, 24))
#: name of a parameter of ``run`` -> names of the same option in torchrun, mpiexec, accelerate and srun
_ALIASES = {
    "size": ("-np", "--np", "--nprocs", "--num-processes", "--ntasks"),
    "hosts": ("-H", "--host", "-hosts"),
    "hostfile": ("--machinefile", "-machinefile"),
    "chdir": ("--wdir", "-wdir"),
    "names": ("-x",),
    "module": ("--module",),
    "log_dir": ("--log-directory",),
}
#: options of these launchers without an equivalent -> advice
_FOREIGN_OPTIONS = {
    **dict.fromkeys(("--nnodes", "--node-rank"), _HOSTS),
    **dict.fromkeys(
        ("--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--standalone"), _NO_ADDRESS
    ),
    **dict.fromkeys(("--bind-to", "--cpu-bind"), _BIND),
    **dict.fromkeys(("--label", "-l", "--tag-output"), "not needed: lines are prefixed with the rank"),
    **dict.fromkeys(("-ppn", "--ppn"), "give each host its number of ranks: --hosts h1:4,h2:4"),
    **dict.fromkeys(("-genv", "-env"), "write NAME=VALUE before shoal run; for other hosts add --env NAME"),
    "--oversubscribe": "not needed: there may be more ranks than cores",
    "--timeout": "use timeout of coreutils, as in timeout 60 shoal run; SHOAL_TIMEOUT limits operations",
    "--timestamp-output": "use --timestamps",
    "--enable-recovery": "use --min N to go on without failed ranks",
    "--no-python": "not needed: COMMAND may be any program",
}


class _Run(click.Command):
    """A command that accepts the names that other launchers have for its options."""

    def make_parser(self, ctx: click.Context) -> Any:
        parser = super().make_parser(ctx)
        for param in self.params:
            alias = copy.copy(param)
            alias.opts = list(_ALIASES.get(param.name or "", ()))
            if alias.opts:
                alias.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)  # the parser empties the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if not name.startswith("--"):  # click names the first letter of -ppn
                name = next((word for word in words if word.startswith(name)), name).partition("=")[0]
            advice = _FOREIGN_OPTIONS.get(name)
            if advice is None:
                raise
            raise click.UsageError(f"No such option: {name}; {advice}", ctx) from None


def _complete_command(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command(
    cls=_Run,
    context_settings={
        "allow_interspersed_args": False,
        # As torchrun does, accept --log_dir for --log-dir.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    short_help="Run several ranks of a program, here or on several hosts.",
)
@click.option(
    "-n",
    "--ranks",
    "size",
    metavar="NUMBER",
    callback=_number_of_ranks,
    help="Number of ranks, or auto for one per usable core.  [default: 1, or all slots of the hosts]",
)
@click.option("--nproc-per-node", "local_size", hidden=True, callback=_number_of_ranks)
@click.option(
    "--hosts",
    metavar="HOST:SLOTS,...",
    help="Run ranks on these hosts, for example h1:4,h2:4. ssh must reach them without a password; localhost "
    "is this machine, without ssh.",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read the hosts from a file with lines such as h1:4 or h1 slots=4.",
)
@click.option(
    "--srun",
    is_flag=True,
    help="Run ranks on the nodes of this Slurm allocation, on each as many as the job has tasks there.",
)
@click.option(
    "--python",
    metavar="PATH",
    help="With --hosts or --srun: Python interpreter on the hosts.  [default: the one that runs shoal]",
)
@click.option(
    "--chdir",
    metavar="DIR",
    help="Working directory of the ranks, also of a script with a relative path.  [default: the current "
    "directory]",
)
@click.option(
    "--env",
    "names",
    metavar="NAME",
    multiple=True,
    help="With --hosts or --srun: pass this environment variable to the ranks, in addition to the variables "
    "of shoal, PYTHONPATH and OMP_NUM_THREADS. May be repeated.",
)
@click.option(
    "--min",
    "min_ranks",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="When ranks fail, go on while at least this many are running or have finished. Without it, the "
    "first failure ends the job. COMMAND must handle lost ranks: see group.rebuild.",
)
@click.option(
    "--respawn",
    is_flag=True,
    help="With --min: start a new process for each failed rank. It has no rank, and SHOAL_JOIN=1: see "
    "elastic.Session.",
)
@click.option(
    "--max",
    "max_ranks",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="With --min: maximum number of processes for shoal scale. Processes beyond -n have no rank, and "
    "SHOAL_JOIN=1.",
)
@click.option(
    "--spares",
    metavar="NUMBER",
    type=click.IntRange(min=0),
    default=0,
    help="With --min: number of spare processes to start in addition to -n. They have no rank, and "
    "SHOAL_JOIN=1. A session lets a spare join when a rank is lost: see elastic.Session.",
)
@click.option(
    "--max-restarts",
    "restarts",
    metavar="NUMBER",
    type=click.IntRange(min=0),
    default=0,
    help="Restart all ranks after one has failed, at most NUMBER times. SHOAL_EPOCH is the number of earlier "
    "starts. Not with --min.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=float,
    callback=_checked_grace,
    default=STOP_GRACE_S,
    help="Seconds from SIGTERM or Ctrl-C, which are passed on to the ranks, to SIGKILL.  [default: 30]",
)
@click.option(
    "--connect",
    is_flag=True,
    help="Run the rendezvous of C++ programs here, if they cannot start Python themselves.",
)
@click.option(
    "--preload",
    metavar="MODULE,...",
    callback=_modules,
    help="Import these modules, such as torch, once on each host, in a process from which the ranks are "
    "forked. Ranks start faster, above all those of --respawn. Not for modules that start threads.",
)
@click.option("-m", "module", is_flag=True, help="COMMAND is a module, run as by python -m.")
@click.option(
    "--log-dir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write stdout and stderr of rank N to DIR/rankN.log, and the launcher's messages to "
    "DIR/launcher.log (overwritten).",
)
@click.option(
    "--store",
    metavar="URL",
    help="Store of the job (tcp://host:port, file:///path, or a registered scheme), with the secret in "
    "SHOAL_SECRET.  [default: one hosted by the launcher]",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt the connections to the store with TLS 1.3: set SHOAL_TLS=1 for launcher and ranks.",
)
@click.option("--no-prefix", is_flag=True, help="Do not prefix lines of output with the rank.")
@click.option(
    "--collapse",
    is_flag=True,
    help="Merge equal lines that several ranks write within 0.2 s into one line, prefixed with all of these "
    "ranks, such as [0-63].",
)
@click.option(
    "--timestamps",
    is_flag=True,
    help="Prefix lines of output, also in --log-dir, with the local time, such as 2026-11-29T14:03:32.123.",
)
@click.option(
    "--bind",
    is_flag=True,
    help="Bind each rank to an equal share of the cores. With fewer cores than ranks, ranks share a core.",
)
@click.option(
    "--summary",
    is_flag=True,
    help="Print at the end for each rank its operations, bytes and latencies, how long it waited for others, "
    "and for whom.",
)
@metrics_option
@click.option("--dry-run", is_flag=True, help="Print the environment and the commands, without running them.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=_complete_command)
def run(
    size: int | None,
    local_size: int | None,
    hosts: str | None,
    hostfile: Path | None,
    srun: bool,
    python: str | None,
    chdir: str | None,
    names: tuple[str, ...],
    min_ranks: int | None,
    respawn: bool,
    max_ranks: int | None,
    spares: int,
    restarts: int,
    grace: float,
    connect: bool,
    preload: tuple[str, ...],
    module: bool,
    log_dir: Path | None,
    store: str | None,
    tls: bool,
    no_prefix: bool,
    collapse: bool,
    timestamps: bool,
    bind: bool,
    summary: bool,
    metrics: tuple[str, int] | None,
    dry_run: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND (a Python script or module, or a program) with its arguments, once per rank.

    The first word that is not an option is COMMAND; all words after it are passed to COMMAND unchanged. The
    exit code is that of the rank that failed first (128 plus the signal number if a signal killed it), or 0.
    With --min it is also 0 if ranks failed and the others finished.

    Names that torchrun, mpiexec, accelerate and srun have for these options are accepted too: -np, --ntasks,
    --num-processes and (on one machine) --nproc-per-node for -n, -H and --host for --hosts, --machinefile for
    --hostfile, --wdir for --chdir, -x for --env, --module for -m; with - or _ between words.
    """
    all_hosts = _hosts(hosts, hostfile)
    if local_size is not None:
        if size is not None or all_hosts is not None or srun:
            raise click.UsageError(
                "--nproc-per-node is another name of -n for a single machine: leave out one of them; "
                "hosts have their own numbers of slots"
            )
        size = local_size
    given = None
    if srun:
        if all_hosts is not None:
            raise click.UsageError(
                "--srun takes the hosts of the allocation: leave out --hosts and --hostfile"
            )
        given = allocation(os.environ)
        all_hosts = list(given.hosts)
    if any(word == ":" and after.startswith("-") for word, after in itertools.pairwise(command)):
        raise click.UsageError(
            "':' starts another program with mpiexec; shoal run starts one: let it choose by SHOAL_RANK, or "
            "start the programs with mpiexec, where shoal.init finds the ranks too"
        )
    if all_hosts is None and python:
        raise click.UsageError("--python needs --hosts, --hostfile or --srun")
    if missing := [name for name in names if name not in os.environ]:
        raise click.UsageError(f"--env {missing[0]}: there is no such variable in this environment")
    if all_hosts is None and chdir is not None:
        log_dir = None if log_dir is None else log_dir.absolute()
        try:
            os.chdir(chdir)
        except OSError as error:
            raise click.UsageError(f"--chdir {chdir}: {error.strerror}") from None
    if all_hosts is not None:
        size, all_hosts = fit_to_hosts(all_hosts, size, max_ranks, spares, respawn=respawn)
    size = size or 1
    line_format = LineFormat(label=not no_prefix, collapse=collapse, timestamps=timestamps)
    options = LaunchOptions(
        min_ranks=min_ranks,
        max_ranks=max_ranks,
        respawn=respawn,
        restarts=restarts,
        grace=grace,
        line_format=line_format,
        log_dir=log_dir,
        store=store,
        summary=summary,
        metrics=metrics,
    )
    _check_options(options, size, spares)
    elsewhere = all_hosts is not None and chdir is not None
    argv = resolve(command, module=module, python=python or "", elsewhere=elsewhere)
    preloaded = None
    if preload:
        if len(argv) == len(command):  # without an interpreter in front
            raise click.UsageError(
                f"--preload needs a Python script or module, and {command[0]} is a program"
            )
        preloaded = Preload(tuple(argv), preload)
    # Other hosts do not inherit this environment, so a variable that is set here must not suppress a default.
    inherited = {k: v for k, v in os.environ.items() if all_hosts is None or k == "NO_COLOR"}
    prefix_width = line_format.width(max(size, max_ranks or 0) + spares)
    extra = default_variables(size, inherited, _terminal(), prefix_width=prefix_width)
    if connect:
        extra[config.CONNECT.name] = "1"
    if summary:
        extra[config.SUMMARY.name] = "1"
    if tls:
        demand_tls(store)
        extra[config.TLS.name] = "1"
    config.check_variables({**os.environ, **Job(size, spares).variables(0, "", "")})
    epoch = given.restarts if given else 0
    job = Job(size, spares, epoch=epoch) if store is None else Job(size, spares, secret="", epoch=epoch)
    if all_hosts is not None:
        # Each agent divides the cores of its host.
        shown = {k: v for k, v in extra.items() if k != "OMP_NUM_THREADS"}
        plan = HostPlan(
            all_hosts,
            python or sys.executable,
            directory(chdir),
            {**(given.kept if given else {}), **passed_on(names, shown, store=store is not None)},
            bind,
            by_srun=srun,
            named=names,
            preload=preloaded,
        )
        if dry_run:
            click.echo(describe(plan, job, argv, store))
            return 0
        _open_standard_files()
        return launch_on_hosts(plan, argv, job, options)
    bound = divide_cores(usable_cores(), size) if bind else None
    if dry_run:
        click.echo(_dry_run_text(argv, Job(size, spares, secret=""), extra, bound, store, respawn))
        return 0
    return launch(argv, job, extra, options, bound=bound, preload=preloaded)


def _check_options(options: LaunchOptions, size: int, spares: int) -> None:
    if options.line_format.collapse and not options.line_format.label:
        raise click.UsageError(
            "--collapse needs the prefix, which names the ranks of a line: leave out --no-prefix"
        )
    min_ranks, max_ranks = options.min_ranks, options.max_ranks
    if min_ranks is not None and min_ranks > size:
        raise click.BadParameter(
            f"{min_ranks} is more than the job's {counted(size, 'rank')}", param_hint="'--min'"
        )
    if options.respawn and min_ranks is None:
        raise click.UsageError("--respawn needs --min N: the job ends when fewer than N ranks are left")
    if max_ranks is not None and min_ranks is None:
        raise click.UsageError("--max needs --min N: the minimum number of ranks for shoal scale")
    if max_ranks is not None and max_ranks < size:
        raise click.BadParameter(f"expected at least -n ({size}), got {max_ranks}", param_hint="'--max'")
    if spares and min_ranks is None:
        raise click.UsageError("--spares needs --min N: the job ends when fewer than N ranks are left")
    if options.restarts and min_ranks is not None:
        raise click.UsageError(
            "--max-restarts restarts the whole job and cannot be combined with --min, which keeps the other "
            "ranks running; --respawn replaces failed ranks"
        )


def _hosts(hosts: str | None, hostfile: Path | None) -> list[Host] | None:
    if hosts is not None and hostfile is not None:
        raise click.UsageError("--hosts and --hostfile: expected one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return None if hostfile is None else read_hostfile(hostfile)


def launch(
    argv: Sequence[str],
    job: Job,
    extra: Mapping[str, str],
    options: LaunchOptions,
    *,
    bound: Sequence[Sequence[int]] | None = None,
    preload: Preload | None = None,
) -> int:
    """Run ``argv`` on the ranks of ``job``; return the exit code.  Must be called on the main thread.

    Args:
        extra: variables to add to the environment.
        bound: the cores of each rank; None: all ranks run on all cores.
        preload: the modules that the ranks import together, if any.

    Raises:
        UsageError, StoreError, RendezvousError: the store cannot be opened.
        LaunchError: a rank could not be started, or a module not imported; none is left running.
    """
    _open_standard_files()
    inherited = dict(os.environ)
    if job.secret:
        # The ranks must use the job's secret, not the one in a file that the user's environment names.
        inherited.pop("SHOAL_SECRET_FILE", None)

    environment = {**inherited, **extra}
    fork_server = None
    steps = ExitStack()

    def run_once(start: JobStart) -> JobOutcome:
        nonlocal fork_server
        job = start.job
        if preload is not None and fork_server is None:
            own = {name: value for name, value in environment.items() if name not in INITIAL_RANK_VARIABLES}
            # Here signals are handled, so that the server inherits the same dispositions as other ranks.
            fork_server = steps.enter_context(closing(ForkServer(argv, preload.modules, own)))
        with (
            job_store(options.store, job) as meeting_place,
            closing(ReservedPort()) as port,
            Guardian() as guardian,
            closing(ExitNotifier(meeting_place.connect, job.ident, job.epoch)) as notes,
        ):
            rank_launcher = LocalRankLauncher(
                argv,
                job,
                environment,
                store=meeting_place.url,
                master_port=str(port.number),
                guardian=guardian,
                max_ranks=options.max_ranks or job.size,
                bound=bound,
                threaded=job.epoch > 0,
                fork_server=fork_server,
            )
            with closing(Supervisor(start, rank_launcher, notes)) as supervisor:
                if fork_server is not None:
                    try:
                        fork_server.wait_ready(start.signals.wait_readable)
                    except Stopped as stopped:
                        return JobOutcome(128 + stopped.number)
                supervisor.start()
                # This starts threads: from now on no Python code may run between fork and exec.
                meeting_place.start()
                return supervisor.run()

    with steps:
        return run_with_restarts(job, options, run_once)


def _open_standard_files() -> None:
    """Open descriptors 0 to 2 if they are closed, as they may be in a child of a daemon."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _terminal() -> os.terminal_size | None:
    """The size of the terminal that shows the ranks' output; None if stdout or stderr is not a terminal."""
    if is_terminal(1) and is_terminal(2):
        size = shutil.get_terminal_size()
        return size if size.columns > 0 else _USUAL_TERMINAL  # Python 3.10 gives 0 for an unknown size
    return None


def _dry_run_text(
    argv: Sequence[str],
    job: Job,
    extra: Mapping[str, str],
    bound: Sequence[Sequence[int]] | None,
    store: str | None,
    respawn: bool,
) -> str:
    url = "tcp://127.0.0.1:<port>" if store is None else store
    secret = {"SHOAL_SECRET": "<secret>"} if store is None else {}
    ranks = [job.variables(rank, url, "<port>") for rank in range(job.size)]
    for variables in ranks:
        variables |= {**secret, "SHOAL_JOB": "<job>", config.REPORT_FD.name: "<descriptor>"}
    own_names = ("SHOAL_RANK", "SHOAL_LOCAL_RANK", "RANK", "LOCAL_RANK")
    same = {k: v for k, v in ranks[0].items() if k not in own_names}
    lines = ["environment of each rank, in addition to the inherited variables:"]
    lines += [f"  {name}={value}" for name, value in same.items()]
    notes = {"OMP_NUM_THREADS": f"  ({counted(len(os.sched_getaffinity(0)), 'core')} divided by the ranks)"}
    lines += [f"  {name}={value}{notes.get(name, '')}" for name, value in extra.items()]
    for rank, variables in enumerate(ranks):
        own = " ".join(f"{k}={v}" for k, v in variables.items() if k not in same)
        cores = "" if bound is None else f"(on {format_numbers('core', bound[rank])}) "
        lines.append(f"rank {rank}: {cores}{own} {shlex.join(argv)}")
    without = f"the same without {', '.join(INITIAL_RANK_VARIABLES)}, and with SHOAL_JOIN=1"
    if job.spares:
        lines.append(f"{counted(job.spares, 'spare')}: {without}")
    if respawn:
        lines.append(f"replacement of a failed rank: {without}")
    return "\n".join(lines)
