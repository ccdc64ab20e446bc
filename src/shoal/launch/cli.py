"""The ``shoal`` command: a table of subcommands, each imported when it is used."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from ..errors import ShoalError
from ..net import build_version

#: subcommand -> "module:attribute" of its click command
COMMANDS = {
    "run": "shoal.launch.commands.run:run",
    "scale": "shoal.launch.commands.scale:scale",
    "store": "shoal.launch.commands.store:store",
    "worker": "shoal.launch.commands.worker:worker",
    "top": "shoal.tools.top:top",
    "bench": "shoal.tools.bench.command:bench",
    "doctor": "shoal.tools.doctor.command:doctor",
    "dumps": "shoal.tools.dumps:dumps",
    "trace": "shoal.tools.traces.command:trace",
    "config": "shoal.launch.commands.config:config",
}
#: errors of writing to a full disk, or to a terminal that was closed
_OUTPUT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: subcommands for internal use: ``shoal run --hosts`` starts an agent on each host
HIDDEN = {"agent": "shoal.launch.commands.agent:agent"}


class _LazyGroup(click.Group):
    """A group that imports a subcommand when it is used, so that ``shoal run`` imports no other one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = {**COMMANDS, **HIDDEN}.get(cmd_name)
        if target is None:
            return None
        module, attribute = target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


def _print_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"shoal {build_version()}")
        ctx.exit()


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Run and inspect distributed jobs."""


def invoke(arguments: Sequence[str]) -> int:
    """Run the command line ``arguments`` (without the program name); return the exit code.

    An error in the command line is one line on stderr and exit code 2.
    """
    try:
        code = cli.main(list(arguments) or ["--help"], prog_name="shoal", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"shoal: {error.format_message()}", err=True)
        return error.exit_code if isinstance(error, click.UsageError) else 2
    except ShoalError as error:
        click.echo(f"shoal: {error}", err=True)
        return 2
    except click.Abort:
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRNOS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # do not try to write the rest of a buffer again
        click.echo(f"shoal: stdout cannot be written: {error.strerror}", err=True)
        return os.EX_IOERR
    return int(code or 0)


def main() -> NoReturn:
    """The entry point of the ``shoal`` script and of ``python -m shoal``."""
    sys.exit(invoke(sys.argv[1:]))
