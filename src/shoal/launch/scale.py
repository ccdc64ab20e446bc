"""``shoal scale``: another number of processes for a job that runs."""

from __future__ import annotations

import click

from ..errors import LaunchError
from .control import ask, launchers


@click.command(short_help="Change the number of processes of a job that runs.")
@click.option(
    "--job",
    "launcher",
    metavar="PID",
    type=click.IntRange(min=1),
    help="Process id of the shoal run, if several run here.",
)
@click.argument("number", type=click.IntRange(min=1))
def scale(launcher: int | None, number: int) -> int:
    """Give a job that runs under shoal run --max so many processes.

    More are started as processes that join the others; to have fewer, those in the highest slots get SIGTERM.
    """
    if launcher is None:
        found = launchers()
        if not found:
            raise LaunchError("no job of this user runs under shoal run --max here")
        if len(found) > 1:
            raise LaunchError(f"several jobs run under shoal run --max: name one by --job, of {found}")
        launcher = found[0]
    click.echo(f"shoal: {ask(launcher, number)}")
    return 0
