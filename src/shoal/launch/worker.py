"""``shoal worker``: a node that joins masters by itself."""

from __future__ import annotations

import os
import signal
import socket
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
def worker(url: str, name: str | None, threads: int | None) -> int:
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

        from ..controller.serving import serve_masters

        if threads is not None:
            torch.set_num_threads(threads)
        named = name or socket.gethostname()
        mine = f"shoal worker {named} (process {os.getpid()})"
        serve_masters(url, named, lambda text: click.echo(f"{mine}: {text}", err=True))
    return 0
