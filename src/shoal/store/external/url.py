"""URLs of stores on third-party servers: ``scheme://user:password@host:port,host:port?ca=&cert=&key=``.

If the servers have databases, the URL names one server, and ``/number`` selects a database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ... import config
from ...errors import UsageError
from ...net import format_address, parse_address

_FILES = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class ExternalUrl:
    """The parts of such a URL.

    Attributes:
        servers: ``host:port`` of each server.
        user, password: from the URL, or from ``SHOAL_STORE_USER`` and ``SHOAL_STORE_PASSWORD``.
        ca, cert, key: paths of PEM files.
        database: number of the database.
    """

    servers: list[str]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    database: int = 0


def parse_external_url(
    url: SplitResult, default_port: int, *, tls: bool, databases: bool = False
) -> ExternalUrl:
    """Parse the URL of a store on third-party servers.

    Args:
        default_port: of servers without a port in the URL.
        tls: whether the URL may name certificates.
        databases: whether the URL names a single server, and may select one of its databases.

    Raises:
        UsageError: the URL is malformed.
    """
    named, at, hosts = url.netloc.rpartition("@")
    shown = redacted(url.geturl())
    expected = (
        f"expected {url.scheme}://[user:password@]host:port"
        + ("[/number of a database]" if databases else "[,host:port...]")
        + ("[?ca=FILE&cert=FILE&key=FILE]" if tls else "")
    )
    database = url.path.removeprefix("/") or "0"
    if url.fragment or not re.fullmatch("[0-9]{1,9}" if databases else "0", database, re.ASCII):
        raise UsageError(f"store {shown!r}: {expected}")
    if databases and "," in hosts:
        raise UsageError(f"store {shown!r}: {expected}, one server (for a cluster, any of its servers)")
    servers = []
    for each in hosts.split(","):
        try:
            host, port = parse_address(each)
        except UsageError as error:
            raise UsageError(f"store {shown!r}: {expected}: {error}") from None
        servers.append(format_address(host, port or default_port))
    files: dict[str, str] = {}
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        if not tls or name not in _FILES or name in files:
            raise UsageError(f"store {shown!r}: {expected}, not {name}=")
        if value:
            files[name] = value
    user, colon, password = named.partition(":")
    return ExternalUrl(
        servers,
        unquote(user) or config.STORE_USER.get(),
        unquote(password) if at and colon else config.STORE_PASSWORD.get(),
        **files,
        database=int(database),
    )


def split_url(what: str, url: str) -> SplitResult:
    """Split ``url`` into its parts; its authority may be a list of hosts, separated by commas.

    ``urllib.parse.urlsplit`` of newer Python releases refuses a list that begins with an IPv6 address.

    Args:
        what: the kind of URL, for the error.

    Raises:
        UsageError: the URL has no valid form.
    """
    listed = re.match(r"([^:/?#]+://)([^/?#]*,[^/?#]*)(.*)", url, re.DOTALL)
    try:
        if listed:
            return urlsplit(listed[1] + listed[3])._replace(netloc=listed[2])
        return urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{what} {redacted(url)!r}: {error}") from None


def redacted(url: str) -> str:
    """Return ``url`` with asterisks instead of a password."""
    return re.sub(r"(://[^:/?#@]*):.*@", r"\1:***@", url)
