"""``shoal worker``: a node that joins masters by itself."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

import click


@click.command(short_help="Join a master as one of its nodes.")
@click.argument("url", metavar="URL")
@click.option(
    "--name", metavar="NAME", help="What the worker is called in messages.  [default: this host's name]"
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="Threads that an operation computes with.  [default: torch's, one for each core]",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Where tensors of the node are made: cpu, or a GPU such as cuda:0.  [default: cpu]",
)
@click.option(
    "--import",
    "imports",
    metavar="MODULE",
    multiple=True,
    help="A module to import first, such as one that registers operators with torch; may be repeated.",
)
def worker(
    url: str, name: str | None, threads: int | None, device: str | None, imports: tuple[str, ...]
) -> int:
    """Serve the masters that come to URL, one after another, until SIGINT or SIGTERM.

    URL is that of shoal.init_master_worker(url=...): tcp://host:port, file:///path, or a registered
    scheme. The secret comes from SHOAL_SECRET, or from the file that SHOAL_SECRET_FILE names.
    When a master ends, the worker lets go of all of its tensors. It ends when it has found no store
    at URL for SHOAL_TIMEOUT seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        import torch  # which takes seconds, and a wrong command line shall not

        from ...controller.node import accelerators
        from ...controller.node.serving import serve_masters
        from ...controller.protocol.imports import import_all

        if threads is not None:
            torch.set_num_threads(threads)
        if device is not None:
            accelerators.choose(device)
        sys.path.append(os.getcwd())  # which a command that was installed does not look into
        import_all(imports, "this worker")
        named = name or socket.gethostname()
        mine = f"shoal worker {named} (process {os.getpid()})"
        serve_masters(url, named, lambda text: click.echo(f"{mine}: {text}", err=True))
    return 0
