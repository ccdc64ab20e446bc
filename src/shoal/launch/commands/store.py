"""``shoal store``: a store, or a job's record in an external store, for ranks started by other means."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import click

from ... import config
from ...errors import UsageError
from ...net import Deadline
from ...rendezvous import Request, default_secret, job_record, open_venue, parse_url
from ...store import parse_address
from ...store.external.url import redacted
from ...store.tcp.durable_server import make_server
from ...store.urls import EXTERNAL_SCHEMES
from ..job.job_store import demand_tls
from ..metrics.endpoint import MetricsEndpoint, metrics_option


@click.command(short_help="Host a store for ranks that are started by other means.")
@click.option("--listen", metavar="HOST:PORT", help="Address to listen on.  [default: 127.0.0.1:0]")
@click.option(
    "--size",
    type=click.IntRange(min=1),
    help="Number of ranks of the job; with it, ranks need only this address and the secret.",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the data to this directory before acknowledging it. A store restarted with the same DIR and "
    "PORT keeps its data and clients.",
)
@click.option(
    "--store",
    "url",
    metavar="URL",
    help="Do not host a store: write the record of the job (of --size ranks) into this one, redis://... or "
    "etcd://..., and keep it there.",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt all connections with TLS 1.3, as SHOAL_TLS=1 does. The ranks need SHOAL_TLS=1.",
)
@metrics_option
def store(
    listen: str | None,
    size: int | None,
    log: Path | None,
    url: str | None,
    tls: bool,
    metrics: tuple[str, int] | None,
) -> int:
    """Host a TCP store until SIGINT or SIGTERM. Port 0 is any free port; the address is printed.

    The secret is read from SHOAL_SECRET, or from the file named by SHOAL_SECRET_FILE. Without a secret the
    store listens only on loopback and serves only processes of the same user. With --size,
    `shoal.init("tcp://host:port")` assigns ranks by arrival, in the job named by SHOAL_JOB. With --store the
    job's record is in an external store, which needs a secret, until this program and all ranks have ended.
    With --metrics it exports the ranks of this machine: those of its job with --size, else of all jobs.
    """
    if tls:
        demand_tls(url)
    config.check_variables(os.environ)
    records = job_record(size, config.JOB.get(), config.EPOCH.get()) if size is not None else {}
    # SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if url is not None and (listen is not None or log is not None):
        raise UsageError(
            "--store uses an external store; --listen and --log apply to a store that this command hosts"
        )
    with suppress(KeyboardInterrupt), ExitStack() as steps:
        endpoint = None
        if metrics is not None:
            endpoint = steps.enter_context(closing(MetricsEndpoint(*metrics)))
            endpoint.add_ranks(None if size is None else config.JOB.get())
        if url is None:
            listen = "127.0.0.1:0" if listen is None else listen
            host, _ = parse_address(listen)
            server = make_server(listen, secret=default_secret(host), records=records, log=log)
            steps.enter_context(server)
            if endpoint is not None:
                endpoint.add_store(server)
            click.echo(f"shoal store: {server.url}")
        else:
            steps.enter_context(_record(url, records))
            click.echo(f"shoal store: {redacted(url)}")
        if endpoint is not None:
            endpoint.start()
            click.echo(f"shoal store: metrics: {endpoint.url}")
        threading.Event().wait()
    return 0


@contextmanager
def _record(url: str, records: dict[str, bytes]) -> Iterator[None]:
    """A context with ``records`` in the store at ``url``."""
    parts = parse_url(url)
    if parts.scheme not in EXTERNAL_SCHEMES or not records:
        schemes = ", ".join(f"{scheme}://" for scheme in EXTERNAL_SCHEMES)
        raise UsageError(
            f"--store {redacted(url)}: expected an external store ({schemes}), and --size, the number of "
            "ranks for the job's record"
        )
    venue = open_venue(Request(parts, None, None, config.secret(), Deadline(config.TIMEOUT.get())))
    with venue.store as store:
        store.multi_set([*records], [*records.values()])
        yield
