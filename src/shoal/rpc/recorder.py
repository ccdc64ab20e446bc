"""The recorder of a worker's pending calls and of the calls that it serves.

It is always on.  The endpoint stores the name of each call until the call ends; the lists are generated from
its calls on request.  So a call is listed whatever its age, even if its future was discarded.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from .. import config
from ..common.copy_refusal import refuses_copies
from ..common.formatting import counted, file_name_part, text_of
from ..common.text_table import text_table
from ..errors import CallTimeout
from ..group.diagnostics import dumps

if TYPE_CHECKING:
    from .agent import Agent

_logger = logging.getLogger("shoal")

#: format version of a dump; incremented when its contents change meaning
SCHEMA = "shoal.calls/1"
#: number of calls of each kind that an error lists
_MAX_LISTED_CALLS = 3
#: seconds for which the list in an error is cached
_SUMMARY_CACHE_S = 0.25


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call of this worker that has no reply yet.

    Attributes:
        call: name of the function, e.g. ``"torch.add"``.
        callee: name of the called worker.
        seconds: age of the call.
    """

    call: str
    callee: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.call} at {self.callee!r} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Served:
    """A call of another worker that this one has not answered yet.

    Attributes:
        call: name of the function; ``""`` until the call has been decoded.
        caller: name of the calling worker.
        seconds: since a thread began to handle it; None: it waits for a thread.
    """

    call: str
    caller: str
    seconds: float | None

    def __str__(self) -> str:
        for_long = "waits" if self.seconds is None else f"for {self.seconds:.1f} s"
        return f"{self.call or 'a call'} of {self.caller!r} {for_long}"


@refuses_copies("a CallRecorder", "the records of a running agent", "Copy what entries() returns")
class CallRecorder:
    """Lists the calls of one agent.  Thread-safe."""

    def __init__(self, agent: Agent, job: str) -> None:
        self._agent = agent
        self._job = job
        self._summary = ""
        self._summary_at = -_SUMMARY_CACHE_S
        self._dumped = threading.Lock()
        #: further fields of a dump: name -> function that returns the value
        self.extra_fields: dict[str, Callable[[], Any]] = {}

    def pending(self) -> list[PendingCall]:
        """Return all calls without a reply, the oldest first."""
        found = [
            PendingCall(self._name(shown, self._worker(peer)), self._worker(peer), seconds)
            for peer, _, shown, seconds in self._agent.endpoint.post.pending()
        ]
        return sorted(found, key=lambda each: -each.seconds)

    def served(self) -> list[Served]:
        """Return all unanswered calls of other workers, the oldest first; calls waiting for a thread last."""
        found = [
            Served(note, self._worker(peer), seconds)
            for peer, _, note, seconds in self._agent.endpoint.post.handled()
        ]
        return sorted(found, key=lambda each: -(each.seconds or 0.0))

    def __repr__(self) -> str:
        return f"<CallRecorder of {self._title()}; print(recorder.dump()) shows them>"

    def dump(self) -> str:
        """Return the calls as human-readable tables, with times in milliseconds."""
        parts = [self._title()]
        if pending := self.pending():
            rows = [(each.call, each.callee, f"{each.seconds * 1e3:.1f}") for each in pending]
            parts.append("pending:\n" + text_table(("call", "at", "age ms"), rows))
        if served := self.served():
            rows = [(each.call, each.caller, _milliseconds(each.seconds)) for each in served]
            parts.append("served here:\n" + text_table(("call", "of", "running ms"), rows))
        return "\n".join(parts)

    def summary(self) -> str:
        """Return the oldest pending and served calls as text for an error; "" if there are none."""
        if (
            time.monotonic() - self._summary_at > _SUMMARY_CACHE_S
        ):  # cached for the case of many errors at once
            self._summary = "".join(
                f"; {what}: {', '.join(map(str, some))}" + (f" and {more} more" if more > 0 else "")
                for what, some, more in (
                    ("also pending here", *_oldest(self.pending())),
                    ("served here", *_oldest(self.served())),
                )
                if some
            )
            self._summary_at = time.monotonic()
        return self._summary

    # -- files ---------------------------------------------------------------------------------

    def contents(self, error: BaseException | None = None) -> dict[str, Any]:
        """Return the contents of a dump: see ``docs/recorder.md``."""
        return {
            "schema": SCHEMA,
            "job": self._job,
            "worker": self._agent.name,
            "state": "closed" if self._agent.closed else "open",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "now": monotonic_ns(),
            "error": None if error is None else {"type": type(error).__name__, "message": text_of(error)},
            "pending": self.pending(),
            "served": self.served(),
            "stacks": dumps.stacks(),
            **{name: give() for name, give in list(self.extra_fields.items())},
        }

    def write(self, path: str | os.PathLike[str] | None, error: BaseException | None = None) -> Path:
        """Write a dump; see :meth:`Agent.dump`."""
        words = (
            "shoal",
            *filter(None, map(file_name_part, (self._job, self._agent.name))),
            "rpc",
            str(os.getpid()),
        )
        return dumps.save(self.contents(error), path, "-".join(words) + ".json")

    def timed_out(self, error: CallTimeout) -> None:
        """Write a dump into ``SHOAL_DUMP_DIR`` at the first timeout of a call.  Never raises."""
        if config.DUMP_DIR.get() is None or not self._dumped.acquire(blocking=False):
            return
        try:
            path = self.write(dumps.directory(), error)
            _logger.warning("worker %r wrote its calls at the first timeout to %s", self._agent.name, path)
        except Exception as why:
            _logger.warning("worker %r cannot write a dump: %s", self._agent.name, why)

    # -- inside --------------------------------------------------------------------------------

    def _title(self) -> str:
        pending, served = len(self.pending()), len(self.served())
        return f"worker {self._agent.name!r}: {counted(pending, 'call')} pending, {served} served"

    def _worker(self, peer: int) -> str:
        try:
            name: str = self._agent.connections.by_number(peer).worker.name
        except KeyError:  # lost, and its connection was discarded long ago
            name = ""
        return name

    def _name(self, shown: str, callee: str) -> str:
        return shown.removeprefix(f"worker {self._agent.name!r}: ").removesuffix(f" at {callee!r}")


def _oldest(found: list[Any]) -> tuple[list[Any], int]:
    return found[:_MAX_LISTED_CALLS], len(found) - _MAX_LISTED_CALLS


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"
