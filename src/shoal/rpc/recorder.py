"""The recorder of calls: those of a worker that are pending, and those that it serves.

It is always on.  A call pays for it with the text of its name, which the endpoint keeps until the call ends;
the lists are made of the endpoint's calls when somebody asks.  So a call is listed however old it is, and
also if nobody has its future any more.
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
from typing import Any

from .. import config
from ..common.copy_refusal import refuses_copies
from ..common.wording import counted, text_of
from ..errors import CallTimeout
from ..group.diagnostics import dumps
from ..recorder import table

_logger = logging.getLogger("shoal")

#: The version of the contents of a dump; it changes with their meaning.
SCHEMA = "shoal.calls/1"
#: how many calls of each kind an error names
_NAMED = 3
#: seconds for which the calls that an error names may be out of date
_STALE = 0.25


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that this worker made and that has no reply yet.

    Attributes:
        call: what is called, e.g. ``"torch.add"``.
        callee: the worker that is called.
        seconds: since it was made.
    """

    call: str
    callee: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.call} at {self.callee!r} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Served:
    """A call that another worker made and that this one has not answered yet.

    Attributes:
        call: the function; ``""`` as long as nothing of it is known.
        caller: the worker that called.
        seconds: since a thread took it up; None: it still waits for one.
    """

    call: str
    caller: str
    seconds: float | None

    def __str__(self) -> str:
        for_long = "waits" if self.seconds is None else f"for {self.seconds:.1f} s"
        return f"{self.call or 'a call'} of {self.caller!r} {for_long}"


@refuses_copies(
    "a CallRecorder",
    "the records of an agent that goes on",
    "Copy what entries() returns",
)
class CallRecorder:
    """The calls of one agent.  May be used from any thread.

    Args:
        agent: whose.
        job: its job.
    """

    def __init__(self, agent: Any, job: str) -> None:
        self._agent = agent
        self._job = job
        self._words = ""
        self._words_at = -_STALE
        self._dumped = threading.Lock()
        #: what else a dump holds, by name: functions that give it
        self.also: dict[str, Callable[[], Any]] = {}

    def pending(self) -> list[PendingCall]:
        """All calls without a reply, the oldest first."""
        found = [
            PendingCall(self._name(shown, self._worker(peer)), self._worker(peer), seconds)
            for peer, _, shown, seconds in self._agent.endpoint.post.pending()
        ]
        return sorted(found, key=lambda each: -each.seconds)

    def served(self) -> list[Served]:
        """All calls of others that are not answered yet, the oldest first; those that wait come last."""
        found = [
            Served(note, self._worker(peer), seconds)
            for peer, _, note, seconds in self._agent.endpoint.post.handled()
        ]
        return sorted(found, key=lambda each: -(each.seconds or 0.0))

    def __repr__(self) -> str:
        return f"<CallRecorder of {self._title()}; print(recorder.dump()) shows them>"

    def dump(self) -> str:
        """The calls as tables for people, with times in milliseconds."""
        parts = [self._title()]
        if pending := self.pending():
            rows = [(each.call, each.callee, f"{each.seconds * 1e3:.1f}") for each in pending]
            parts.append("pending:\n" + table(("call", "at", "age ms"), rows))
        if served := self.served():
            rows = [(each.call, each.caller, _milliseconds(each.seconds)) for each in served]
            parts.append("served here:\n" + table(("call", "of", "running ms"), rows))
        return "\n".join(parts)

    def words(self) -> str:
        """The oldest calls that are pending and served, for an error; "" if there are none."""
        if time.monotonic() - self._words_at > _STALE:  # many errors at once need not look each
            self._words = "".join(
                f"; {what}: {', '.join(map(str, some))}" + (f" and {more} more" if more > 0 else "")
                for what, some, more in (
                    ("also pending here", *_oldest(self.pending())),
                    ("served here", *_oldest(self.served())),
                )
                if some
            )
            self._words_at = time.monotonic()
        return self._words

    # -- files ---------------------------------------------------------------------------------

    def contents(self, error: BaseException | None = None) -> dict[str, Any]:
        """The contents of a dump: see ``docs/recorder.md``."""
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
            **{name: give() for name, give in list(self.also.items())},
        }

    def write(self, path: str | os.PathLike[str] | None, error: BaseException | None = None) -> Path:
        """Write a dump; see :meth:`Agent.dump`."""
        words = (
            "shoal",
            *filter(None, map(dumps.word, (self._job, self._agent.name))),
            "rpc",
            str(os.getpid()),
        )
        return dumps.save(self.contents(error), path, "-".join(words) + ".json")

    def timed_out(self, error: CallTimeout) -> None:
        """A call had no reply in time: write a dump into ``SHOAL_DUMP_DIR`` for the first.  Never raises."""
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
            name: str = self._agent.links.line(peer).worker.name
        except KeyError:  # lost, and long forgotten
            name = ""
        return name

    def _name(self, shown: str, callee: str) -> str:
        return shown.removeprefix(f"worker {self._agent.name!r}: ").removesuffix(f" at {callee!r}")


def _oldest(found: list[Any]) -> tuple[list[Any], int]:
    return found[:_NAMED], len(found) - _NAMED


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"
