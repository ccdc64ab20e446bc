"""``shoal scale``: changes the number of processes of a running job."""

from __future__ import annotations

import os
import shlex

import click
import psutil

from ...common.formatting import printable
from ...errors import LaunchError
from ..job.control import ask, launchers

#: maximum length of a printed command
_WIDTH = 200


@click.command(short_help="Change the number of processes of a running job.")
@click.option(
    "--job",
    "launcher",
    metavar="PID",
    type=click.IntRange(min=1),
    help="Process id of the shoal run, if several jobs run on this machine.",
)
@click.argument("number", type=click.IntRange(min=1))
def scale(launcher: int | None, number: int) -> int:
    """Change the number of processes of a job of shoal run --max to NUMBER.

    New processes join the running ones. If there are too many, those in the highest slots get SIGTERM.
    """
    if launcher is None:
        found = launchers()
        if not found:
            raise LaunchError("no job of shoal run --max of this user runs on this machine")
        if len(found) > 1:
            jobs = "".join(f"\n  --job {pid}: {_command(pid)}" for pid in found)
            raise LaunchError(f"several jobs of shoal run --max are running: choose one of them{jobs}")
        launcher = found[0]
    click.echo(f"shoal: {ask(launcher, number)}")
    return 0


def _command(launcher: int) -> str:
    """The command line of a launcher from ``shoal`` on, and its working directory."""
    try:
        process = psutil.Process(launcher)
        words, directory = process.cmdline(), process.cwd()
    except psutil.Error as error:
        return f"(its command cannot be read: {error})"
    # Skip the interpreter and its options: python -m shoal run, or python /usr/bin/shoal run.
    start = next((at for at, word in enumerate(words) if os.path.basename(word) == "shoal"), 0)
    text = printable(shlex.join(["shoal", *words[start + 1 :]] if start else words))
    return f"{text if len(text) <= _WIDTH else text[:_WIDTH] + ' ...'} (in {printable(directory)})"
