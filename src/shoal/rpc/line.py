"""One connection between two workers: who is at each end, and what both know of the other."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from .directory import Worker
from .numbering import Received, Sent


class Hello(msgspec.Struct):
    """The worker at one end says who it is, and what it expects at the other.

    Attributes:
        worker: who speaks.
        place: job, epoch and namespace.
        to: the incarnation that the connection is for; "" in the answer.
        main: the program that the process runs, "" if it has no file.
        restricted: whether it sends and takes plain values only.
    """

    worker: Worker
    place: str
    to: str
    main: str
    restricted: bool


class Line:
    """One connection, as the codec and the calls on it see it.

    Attributes:
        agent: whose end this is.
        number: of the peer in the endpoint.
        worker: the other end.
        shares_main: whether both ends run the same program.
        plain: whether one of the two is restricted, so that nothing on it is a pickle.
        sent, received: the functions that have numbers on it.
        ended: whether it is lost.
    """

    __slots__ = ("agent", "ended", "number", "plain", "received", "sent", "shares_main", "worker")

    def __init__(self, agent: Any, worker: Worker, shares_main: bool, plain: bool) -> None:
        self.agent = agent
        self.plain = plain
        self.number = -1
        self.worker = worker
        self.shares_main = shares_main
        self.sent = Sent()
        self.received = Received()
        self.ended = False


@cache
def main_program() -> str:
    """Identity of the program that this process runs: a digest of its text, "" if it has no file."""
    path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        return ""
    try:
        text = Path(path).read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(text, digest_size=16).hexdigest() + "/" + os.path.basename(path)
