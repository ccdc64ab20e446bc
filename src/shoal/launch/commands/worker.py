"""``shoal worker``: a node that joins masters at a URL."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

import click


@click.command(short_help="Join a master as one of its nodes.")
@click.argument("url", metavar="URL")
@click.option("--name", metavar="NAME", help="Name of the worker in messages.  [default: the host name]")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="Number of threads of an operation.  [default: that of torch, one per core]",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Device of the node's tensors: cpu, or a GPU such as cuda:0.  [default: cpu]",
)
@click.option(
    "--import",
    "imports",
    metavar="MODULE",
    multiple=True,
    help="Module to import first, such as one that registers operators with torch. May be repeated.",
)
def worker(
    url: str, name: str | None, threads: int | None, device: str | None, imports: tuple[str, ...]
) -> int:
    """Serve the masters at URL, one after another, until SIGINT or SIGTERM.

    URL is that of shoal.init_master_worker(url=...): tcp://host:port, file:///path, or a registered
    scheme. The secret is read from SHOAL_SECRET, or from the file named by SHOAL_SECRET_FILE.
    When a master ends, the worker releases all of its tensors. The worker exits if it finds no store at URL
    for SHOAL_TIMEOUT seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        import torch  # takes seconds; a wrong command line is rejected before

        from ...controller.node import accelerators
        from ...controller.node.serving import serve_masters
        from ...controller.protocol.workers import import_all

        if threads is not None:
            torch.set_num_threads(threads)
        if device is not None:
            accelerators.choose(device)
        sys.path.append(os.getcwd())  # an installed script does not have it
        import_all(imports, "this worker")
        named = name or socket.gethostname()
        mine = f"shoal worker {named} (process {os.getpid()})"
        serve_masters(url, named, lambda text: click.echo(f"{mine}: {text}", err=True))
    return 0
