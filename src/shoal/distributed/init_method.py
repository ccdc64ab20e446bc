"""Conversion of torch's ``init_method`` and environment to URL, rank and size for ``shoal.init``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode, urlunsplit

from ..errors import UsageError
from ..rendezvous.environment import read, tcp_url
from ..store.external.url import split_url

#: The query parameters of torch's URLs.
_RANK, _SIZE, _LIBUV = "rank", "world_size", "use_libuv"


def meeting_place(
    init_method: str | None, rank: int, world_size: int, environ: Mapping[str, str] = os.environ
) -> tuple[str, int | None, int | None]:
    """Return URL, rank and size for ``shoal.init``.

    Args:
        init_method: as in torch: ``env://`` (None), ``tcp://host:port`` or ``file:///path``, optionally with
            ``?rank=0&world_size=2``; or another URL of shoal.
        rank, world_size: -1: taken from the URL or the environment, or assigned in order of arrival.

    Raises:
        UsageError: rank or size is given twice, or is not a number.
    """
    if init_method is not None and not isinstance(init_method, str):
        raise UsageError(f"init_method={init_method!r}: expected a str")
    url, query = _without_query(init_method or "env://")
    own_rank = _number("rank", rank, query.get(_RANK))
    own_size = _number("world_size", world_size, query.get(_SIZE))
    if url == "env://":
        return _in_environment(own_rank, own_size, environ)
    return url, own_rank, own_size


def _without_query(url: str) -> tuple[str, dict[str, str]]:
    parts = split_url("init_method", url)
    pairs = parse_qsl(parts.query)
    ours = {name: value for name, value in pairs if name in (_RANK, _SIZE)}
    others = [(name, value) for name, value in pairs if name not in (_RANK, _SIZE, _LIBUV)]
    if not parts.query:
        return url, ours  # urlunsplit would drop the slashes of env://
    plain = urlunsplit(parts._replace(query=urlencode(others)))
    return ("env://" if parts.scheme == "env" else plain), ours


def _number(what: str, argument: int, in_url: str | None) -> int | None:
    if not isinstance(argument, int):
        raise UsageError(f"{what}={argument!r}: expected an integer")
    if in_url is None:
        return None if argument == -1 else argument
    if argument != -1:
        raise UsageError(f"{what} is given twice: {argument} as an argument and {in_url} in the URL")
    if not in_url.isdecimal():
        raise UsageError(f"{what}={in_url!r} in the URL: expected a non-negative integer")
    return int(in_url)


def _in_environment(
    rank: int | None, size: int | None, environ: Mapping[str, str]
) -> tuple[str, int | None, int | None]:
    """Return ``env://``, or the address in the MASTER_ADDR and MASTER_PORT of a script without a launcher.

    Such a script passes rank and size as arguments, or one of them in RANK or WORLD_SIZE.  A launcher's
    variables come first, because they contain more (the processes on this host, the job's incarnation).
    """
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return "env://", rank, size
    others = {name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    if read(others) is not None:
        return "env://", rank, size
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    rank = _or_variable(rank, environ, "RANK")
    size = _or_variable(size, environ, "WORLD_SIZE")
    if not address or not port or rank is None or size is None:
        return "env://", rank, size
    if not port.isdecimal():
        raise UsageError(f"MASTER_PORT={port!r}: expected an integer")
    return tcp_url(address, int(port)), rank, size


def _or_variable(value: int | None, environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if value is not None or not text:
        return value
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: expected a non-negative integer")
    return int(text)
