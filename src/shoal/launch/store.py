"""``shoal store``: a TCP store by itself, for ranks that somebody else starts."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import click

from .. import config
from ..rendezvous import default_secret, job_record
from ..store import parse_address, serve


@click.command(short_help="Host a store for ranks that are started by other means.")
@click.option("--listen", metavar="HOST:PORT", default="127.0.0.1:0", show_default=True)
@click.option(
    "--size",
    type=click.IntRange(min=1),
    help="Number of ranks: a process then needs no more than this address and the secret.",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the data in this directory: what was acknowledged is on disk. Start the store again with the "
    "same DIR and PORT, and its clients go on.",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt all connections, with TLS 1.3, as SHOAL_TLS=1 does. The ranks need SHOAL_TLS=1.",
)
def store(listen: str, size: int | None, log: Path | None, tls: bool) -> int:
    """Host a TCP store until SIGINT or SIGTERM. Port 0 takes a free one; the address is printed.

    The secret comes from SHOAL_SECRET, or from the file that SHOAL_SECRET_FILE names; without one,
    only loopback is served, and only processes of the same user. With --size,
    `shoal.init("tcp://host:port")` gives ranks by arrival in the job that SHOAL_JOB names.
    """
    if tls:
        os.environ[config.TLS.name] = "1"
    config.check_values(os.environ)
    host, _ = parse_address(listen)
    records = job_record(size, config.JOB.get(), config.EPOCH.get()) if size is not None else {}
    # Set for SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        serve(listen, secret=default_secret(host), records=records, log=log, announce=_announce)
    return 0


def _announce(url: str) -> None:
    click.echo(f"shoal store: {url}")
