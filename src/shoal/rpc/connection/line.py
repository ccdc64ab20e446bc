"""One connection between two workers: who is at each end, and what both know of the other."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...errors import UsageError
from .device_maps import DeviceMap, unmapped
from .directory import Worker
from .numbering import Received, Sent


class WorkerHello(msgspec.Struct):
    """The worker at one end says who it is, and what it expects at the other.

    Attributes:
        worker: who speaks.
        place: job, epoch and namespace.
        to: the incarnation that the connection is for; "" in the answer.
        main: the program that the process runs, "" if it has no file.
        restricted: whether it sends and takes plain values only.
        nth: how many times this worker has introduced itself; orders the connections that it makes.
        lends: whether it shares memory with workers of its host.
        devices: the caller's device for each device of the callee that its calls use; of the calling side.
        refused: why there is no connection; of the answer.
    """

    worker: Worker
    place: str
    to: str
    main: str
    restricted: bool
    nth: int
    lends: bool
    devices: dict[str, str] = {}
    refused: str = ""


class WorkerConnection:
    """One connection, as the codec and the calls on it see it.

    Attributes:
        agent: whose end this is.
        number: of the peer in the endpoint.
        worker: the other end.
        shares_main: whether both ends run the same program.
        plain: whether one of the two is restricted, so that nothing on it is a pickle.
        sent, received: the functions that have numbers on it.
        ended: whether it is lost.
        devices: where the tensors of devices go; None: they are not sent.
        calls: whether the calls on it are made at this end.
        nth: orders those that the other end has made.
    """

    __slots__ = (
        "agent",
        "calls",
        "devices",
        "ended",
        "nth",
        "number",
        "plain",
        "received",
        "sent",
        "shares_main",
        "worker",
    )

    def __init__(
        self,
        agent: Any,
        worker: Worker,
        shares_main: bool,
        plain: bool,
        devices: DeviceMap | None,
        calls: bool,
        nth: int,
    ) -> None:
        self.agent = agent
        self.plain = plain
        self.number = -1
        self.worker = worker
        self.shares_main = shares_main
        self.sent = Sent(self._in_use)
        self.received = Received()
        self.ended = False
        self.devices = devices
        self.calls = calls
        self.nth = nth

    def _in_use(self) -> list[int]:
        numbers: list[int] = self.agent.endpoint.post.functions_in_use(self.number)
        return numbers

    def target(self, x: torch.Tensor) -> torch.device:
        """The device of ``x`` at the other end.

        Raises:
            UsageError: there is none.
        """
        if self.devices is not None:
            return self.devices.target(x)
        caller, callee = self.agent.name, self.worker.name
        if not self.calls:
            caller, callee = callee, caller
        raise UsageError(unmapped(x, caller, callee, not self.calls))


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
