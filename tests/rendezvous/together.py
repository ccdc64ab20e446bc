"""Ranks that meet as threads of the test."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from shoal import Membership, Store
from shoal.net import Deadline
from shoal.rendezvous import Request, Venue
from shoal.rendezvous.membership import open_and_rendezvous
from shoal.rendezvous.membership import rendezvous_at as meet_at_place
from shoal.rendezvous.point import RendezvousPoint

T = TypeVar("T")


def together(*calls: Callable[[], T], timeout: float = 30.0) -> list[T | BaseException]:
    """What each of the calls returned or raised, made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        _, late = wait(futures, timeout)
        assert not late, f"{len(late)} of {len(calls)} calls hang"
        return [future.exception() or future.result() for future in futures]


def unknown_host(host: str, port: int) -> NoReturn:
    """Raise what the resolver of a machine with a network raises for a name that does not exist."""
    raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known: {host}:{port}")


def all_well(results: Sequence[Membership | BaseException]) -> list[Membership]:
    """The memberships, if everybody got one."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Membership)]


def request(
    url: str = "env://",
    rank: int | None = None,
    size: int | None = None,
    *,
    secret: bytes = b"",
    timeout: float = 20.0,
    environ: Mapping[str, str] | None = None,
    host: str | None = None,
) -> Request:
    """A request whose environment is empty but for ``environ``."""
    return Request(urlsplit(url), rank, size, secret, Deadline(timeout), environ or {}, host)


def rendezvous_at(
    url: str,
    rank: int | None = None,
    size: int | None = None,
    *,
    secret: bytes = b"",
    timeout: float = 20.0,
    environ: Mapping[str, str] | None = None,
) -> Membership:
    """One rank's meeting at a URL."""
    return open_and_rendezvous(request(url, rank, size, secret=secret, timeout=timeout, environ=environ))


def meet_in(
    store: Store,
    rank: int | None = None,
    size: int | None = None,
    *,
    timeout: float = 20.0,
    job: str = "job",
    epoch: int = 0,
    host: str | None = None,
    others_disconnected: Callable[[], bool] | None = None,
) -> Membership:
    """One rank's meeting in a store in memory; with ``others_disconnected``, of the rank that serves it."""
    venue = Venue(store.clone(), rank, size, job=job, epoch=epoch, others_disconnected=others_disconnected)
    return meet_at_place(RendezvousPoint.at(venue, request("memory://", timeout=timeout, host=host)))


def release_all(memberships: Sequence[Membership]) -> None:
    """All ranks leave."""
    together(*(lambda member=member: member.release(10.0) for member in memberships))
