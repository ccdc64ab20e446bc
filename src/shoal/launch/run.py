"""``shoal run``: several ranks of one program on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing

import click

from ..rendezvous import job_record
from ..store import TCPStoreServer
from .command import resolve
from .environment import Job, ReservedPort, defaults
from .guardian import Guardian
from .notes import ExitNotes
from .signals import Signals
from .sink import is_terminal
from .supervisor import Supervisor


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run several ranks of a program on this machine.",
)
@click.option("-n", "--ranks", "size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("-m", "module", is_flag=True, help="COMMAND is a module, run as python -m does.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(size: int, module: bool, dry_run: bool, command: tuple[str, ...]) -> int:
    """Run COMMAND (a Python script or module, or a program) with its arguments, once for each rank.

    The first word that is not an option is the command; what follows it goes to the command
    untouched. The exit code is that of the first rank that failed (128 and the number of the
    signal, if one killed it), or 0.
    """
    argv = resolve(command, module=module)
    extra = defaults(size, os.environ, _terminal())
    if dry_run:
        click.echo(_plan(argv, size, extra))
        return 0
    return launch(argv, size, extra)


def launch(argv: Sequence[str], size: int, extra: dict[str, str]) -> int:
    """Run ``argv`` on ``size`` ranks with ``extra`` added to the environment; returns the exit code.

    For the main thread.

    Raises:
        LaunchError: a rank could not be started; none is left running.
    """
    _open_standard_files()
    job = Job(size)
    # The secret has one source: a file that the shell names is not it.
    inherited = {name: value for name, value in os.environ.items() if name != "SHOAL_SECRET_FILE"}
    server = TCPStoreServer(secret=job.secret.encode(), records=job_record(size, job.ident))
    with (
        Signals() as signals,
        closing(server),
        closing(ReservedPort()) as port,
        Guardian() as guardian,
        closing(ExitNotes(server, job)) as notes,
    ):
        supervisor = Supervisor(signals, guardian, notes)
        with closing(supervisor):
            for rank in range(size):
                variables = job.variables(rank, server.url, str(port.number))
                supervisor.start(argv, inherited | extra | variables, size)
            # Threads begin here, after the last fork.
            server.start()
            return supervisor.run()


def _open_standard_files() -> None:
    """Make sure that descriptors 0 to 2 are open: who starts daemons likes to close them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _terminal() -> os.terminal_size | None:
    """The size of the terminal that shows the ranks' output, None when none does."""
    if is_terminal(1) and is_terminal(2):
        return shutil.get_terminal_size()
    return None


def _plan(argv: Sequence[str], size: int, extra: Mapping[str, str]) -> str:
    """What ``--dry-run`` prints."""
    ranks = [Job(size).variables(rank, "tcp://127.0.0.1:<port>", "<port>") for rank in range(size)]
    for variables in ranks:
        variables |= {"SHOAL_SECRET": "<secret>", "SHOAL_JOB": "<job>"}
    own_names = ("SHOAL_RANK", "SHOAL_LOCAL_RANK", "RANK", "LOCAL_RANK")
    same = {k: v for k, v in ranks[0].items() if k not in own_names}
    lines = ["each rank's environment, beside what it inherits:"]
    lines += [f"  {name}={value}" for name, value in same.items()]
    notes = {"OMP_NUM_THREADS": f"  (the machine's {len(os.sched_getaffinity(0))} cores, shared)"}
    lines += [f"  {name}={value}{notes.get(name, '')}" for name, value in extra.items()]
    for rank, variables in enumerate(ranks):
        own = " ".join(f"{k}={v}" for k, v in variables.items() if k not in same)
        lines.append(f"rank {rank}: {own} {shlex.join(argv)}")
    return "\n".join(lines)
