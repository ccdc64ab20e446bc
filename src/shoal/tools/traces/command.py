"""The commands ``shoal trace ...``."""

from __future__ import annotations

from pathlib import Path

import click

from ...common.formatting import printable
from .merge import merge_traces


@click.group(short_help="Merge the traces of all ranks, from the files of SHOAL_TRACE.")
def trace() -> None:
    """Work with the traces that SHOAL_TRACE and `shoal.trace` write."""


@trace.command(short_help="Merge the traces of all ranks.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="File to write, compressed if its name ends in .gz.  [default: DIRECTORY/merged.json.gz]",
)
@click.option("--job", default=None, help="Job to merge, if the directory has traces of several jobs.")
def merge(directory: Path, output: Path | None, job: str | None) -> int:
    """Merge the traces of all ranks in DIRECTORY into one file for https://ui.perfetto.dev, and print which
    ranks others waited for.

    Copy the files of all hosts into one directory before. Arrows lead from the last rank of a collective to
    those that waited for it. The clocks of hosts are aligned by the collectives, and the remaining error is
    printed. Files of torch.profiler (*.pt.trace.json) of the same processes become further tracks.
    """
    # Names of files, jobs and hosts may be those of another user.
    try:
        for line in merge_traces(directory, output or directory / "merged.json.gz", job):
            click.echo(printable(line))
    except click.ClickException as error:
        raise click.ClickException(printable(error.message)) from error
    return 0
