"""``shoal store``: a store by itself, or a job's record in one that is there, for ranks that others start."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import click

from ... import config
from ...errors import UsageError
from ...net import Deadline
from ...rendezvous import Request, default_secret, job_record, open_venue, parse_url
from ...store import parse_address, serve
from ...store.external.url import redacted
from ...store.urls import OUTSIDE
from .encryption import demand_tls


@click.command(short_help="Host a store for ranks that are started by other means.")
@click.option("--listen", metavar="HOST:PORT", help="Address of the store.  [default: 127.0.0.1:0]")
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
    "--store",
    "url",
    metavar="URL",
    help="Host nothing: write the job's record (of --size) into this store, redis://... or etcd://..., and "
    "keep it there.",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt all connections, with TLS 1.3, as SHOAL_TLS=1 does. The ranks need SHOAL_TLS=1.",
)
def store(listen: str | None, size: int | None, log: Path | None, url: str | None, tls: bool) -> int:
    """Host a TCP store until SIGINT or SIGTERM. Port 0 takes a free one; the address is printed.

    The secret comes from SHOAL_SECRET, or from the file that SHOAL_SECRET_FILE names; without one,
    only loopback is served, and only processes of the same user. With --size,
    `shoal.init("tcp://host:port")` gives ranks by arrival in the job that SHOAL_JOB names. With --store
    the same holds of a store on other servers, which needs a secret: the job is there until this program and
    all ranks have ended.
    """
    if tls:
        demand_tls(url)
    config.check_values(os.environ)
    records = job_record(size, config.JOB.get(), config.EPOCH.get()) if size is not None else {}
    # Set for SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if url is not None:
        if listen is not None or log is not None:
            raise UsageError(
                "--store names a store on other servers; --listen and --log are for one of its own"
            )
        with suppress(KeyboardInterrupt):
            _keep_record(url, records)
        return 0
    listen = "127.0.0.1:0" if listen is None else listen
    host, _ = parse_address(listen)
    with suppress(KeyboardInterrupt):
        serve(listen, secret=default_secret(host), records=records, log=log, announce=_announce)
    return 0


def _keep_record(url: str, records: dict[str, bytes]) -> None:
    """Write ``records`` into the store that ``url`` names, and keep it open without end."""
    parts = parse_url(url)
    if parts.scheme not in OUTSIDE or not records:
        schemes = ", ".join(f"{scheme}://" for scheme in OUTSIDE)
        raise UsageError(
            f"--store {redacted(url)}: expected a store on other servers ({schemes}), and --size, the number "
            "of ranks: the job's record is what is written there"
        )
    venue = open_venue(Request(parts, None, None, config.secret(), Deadline(config.TIMEOUT.get())))
    with venue.store as store:
        store.multi_set([*records], [*records.values()])
        _announce(redacted(url))
        threading.Event().wait()


def _announce(url: str) -> None:
    click.echo(f"shoal store: {url}")
