"""One connection between two workers: the hello messages and the state of this end."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ... import config
from ...errors import UsageError
from .device_maps import DeviceMap, unmapped
from .directory import Worker
from .function_table import SentFunctions

if TYPE_CHECKING:
    from ..agent import Agent


class WorkerHello(msgspec.Struct):
    """The first message of a worker on a connection.

    Attributes:
        worker: the sender.
        place: job, epoch and namespace.
        to: incarnation of the expected receiver; "" in the answer.
        main: identity of the program that the process runs, "" if it has no file.
        restricted: whether the sender only sends and accepts plain values.
        nth: number of hellos that the sender has sent before; orders the connections that it makes.
        lends: whether the sender shares memory with workers of its host.
        devices: the device map of the caller: device here -> device at the callee; empty in the answer.
        refused: in the answer: reason for refusing the connection, "" if it is accepted.
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


@dataclass(slots=True, eq=False)
class WorkerConnection:
    """This end of one connection, for the codec and for calls.

    Attributes:
        agent: of this end.
        number: of the peer in the endpoint.
        worker: the other end.
        shares_main: whether both ends run the same program.
        restricted: whether one of the two is restricted, so that nothing is pickled.
        sent_functions, received_functions: the functions that have numbers on it, and those of the other end.
        ended: whether it is lost.
        devices: the device map; None: tensors on devices are not sent.
        is_caller: whether this end is the caller.
        hello_number: ``nth`` of the other end's hello; orders the connections that it has made.
    """

    agent: Agent
    worker: Worker
    shares_main: bool
    restricted: bool
    devices: DeviceMap | None
    is_caller: bool
    hello_number: int
    number: int = -1
    ended: bool = False
    sent_functions: SentFunctions = field(default_factory=SentFunctions)
    received_functions: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def target(self, x: torch.Tensor) -> torch.device:
        """Return the device of ``x`` at the other end; raise UsageError if it is not mapped."""
        if self.devices is not None:
            return self.devices.target(x)
        caller, callee = self.agent.name, self.worker.name
        if not self.is_caller:
            caller, callee = callee, caller
        raise UsageError(unmapped(x, caller, callee, not self.is_caller))


#: maximum size of a program whose identity is compared
_MAX_PROGRAM_BYTES = 64 << 20


@cache
def main_program() -> str:
    """Return the identity of the program that this process runs: a digest of its text, "" without a file."""
    path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        return ""
    try:
        text = config.read_file(path, _MAX_PROGRAM_BYTES)
    except OSError:
        return ""
    return hashlib.blake2b(text, digest_size=16).hexdigest() + "/" + os.path.basename(path)
