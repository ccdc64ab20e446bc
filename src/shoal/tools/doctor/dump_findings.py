"""``shoal doctor FILE...``: the findings of ``shoal dumps``, with advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ...common.formatting import counted
from .. import call_dumps, dumps
from ..dump_files import read
from ..findings import Finding, fail, ok


def read_all(paths: Sequence[Path]) -> list[Finding]:
    """Return the findings of all groups and workers in these files and directories.

    Raises:
        click.ClickException: there is no file.
    """
    found, problems = [], []
    for path in dumps.files(paths):
        try:
            found.append(read(path))
        except click.ClickException as error:
            damaged = fail(error.format_message(), "remove the file, or write it again: group.dump()")
            problems += _of("files", [damaged], "")
    groups, workers = dumps.sort(found)
    for (job, group, ranks), members in groups.items():
        topic = f"group {group!r} of {counted(len(ranks), 'rank')}, job {job!r}"
        problems += _of(
            topic, dumps.findings(members, len(ranks)), "all ranks wrote a file and are at the same call"
        )
    for job, of_job in workers.items():
        topic = f"{counted(len(of_job), 'worker')}, job {job!r}"
        problems += _of(topic, call_dumps.findings(of_job), "no worker reports a failure or waits in a cycle")
    return problems


def _of(topic: str, found: list[Finding], otherwise: str) -> list[Finding]:
    return [each.placed(topic, "dumps") for each in found or [ok(otherwise)]]
