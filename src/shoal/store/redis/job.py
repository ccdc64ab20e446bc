"""One life of a job in Redis, shared by the stores of this process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import quote

from ...common.decoding import MalformedMessage, convert
from ...errors import AuthenticationError, StoreError
from ...net import Deadline
from ..external import job as external_job
from ..external.job import ExternalJob, WriteChannel
from .connection import Argument, RedisClient
from .scripts import LIFE, Script

T = TypeVar("T")


class RedisJob(ExternalJob[RedisClient, WriteChannel]):
    """The connections, write channels and membership that clones in this process share."""

    other_reasons = (
        ", or the server has lost its data (it restarted without it, or a replica that lacked it took over, "
        "or it evicts keys)"
    )

    def _join(self, deadline: Deadline) -> None:
        self.key = f"{{shoal:{quote(self.name, safe='')}}}"
        self._member = token_hex(12)
        self.life = own_life = token_hex(12).encode()
        word, self.life = self._live("join", deadline)
        if word != b"done":
            raise self.unreadable(word)
        self.host = self.client.host
        self._began = self.life == own_life

    def warn(self, deadline: Deadline) -> None:
        """Warn if the server may lose acknowledged changes; only in the process that began the job's life."""
        if self._began and (reasons := _losses(self.client, deadline, self._closing)):
            self._began = False
            warnings.warn(
                f"{self.client} may lose changes that it has acknowledged: {'; '.join(reasons)}.  A job "
                "detects the loss of all its data, but may not detect the loss of its last changes.  "
                "shoal store --log and etcd lose none",
                stacklevel=3,
            )

    def run(
        self,
        script: Script,
        arguments: Sequence[Argument],
        kind: type[T],
        deadline: Deadline,
        closed: threading.Event,
        *,
        writes: Callable[[], None] | None = None,
    ) -> tuple[bytes, T | None]:
        """Execute ``script``; return its status and its values. ``writes`` is as of :meth:`RedisClient.run`.

        Raises:
            StoreError: this life of the job has ended (``LIFE`` answers ``gone`` instead), or the answer is
                malformed.
        """
        keys = [self.key, self.key + ":members"] if script is LIFE else [self.key]
        reply = self.client.run(script, keys, arguments, deadline, closed, writes=writes)
        if not isinstance(reply, list) or len(reply) not in (1, 2) or not isinstance(reply[0], bytes):
            raise self.unreadable(reply)
        if reply[0] == b"gone" and script is not LIFE:
            raise self.expired_error()
        try:
            return reply[0], convert(reply[1], kind) if len(reply) == 2 else None
        except MalformedMessage:
            raise self.unreadable(reply) from None

    def unreadable(self, reply: object) -> StoreError:
        """Return the error of a server that answers unlike any script."""
        return StoreError(f"{self}: the server sent an unexpected answer: {repr(reply)[:80]}")

    def _new_channel(self, ident: str) -> WriteChannel:
        return WriteChannel("o" + ident)

    def _live(self, what: str, deadline: Deadline, *more: str) -> tuple[bytes, bytes]:
        milliseconds = int(external_job.KEY_TTL_S * 1000)
        arguments: tuple[Argument, ...] = (what, self._member, self.life, milliseconds, *more)
        # Not cancellable: no caller waits for it, and the server's next answer shows its effect.
        word, life = self.run(LIFE, arguments, bytes, deadline, threading.Event())
        return word, life or b""

    def _keep_alive(self, deadline: Deadline) -> bool:
        word, _ = self._live("keep", deadline)
        return word == b"done"

    def _leave(self, channels: list[str], deadline: Deadline) -> None:
        self._live("leave", deadline, *channels)


def _losses(client: RedisClient, deadline: Deadline, closed: threading.Event) -> list[str]:
    """Return the reasons why the server may lose acknowledged changes, as far as it discloses them."""
    found: dict[str, str] = {}
    try:
        for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy"):
            found |= _pairs(client.command("CONFIG", "GET", name, deadline=deadline, closed=closed))
    except (StoreError, AuthenticationError):
        found = {}  # many users have no permission for CONFIG, and hosted services lack it
    reasons = []
    if found.get("appendonly") == "no":
        reasons.append("it keeps no log (appendonly no)")
    elif found.get("appendonly") == "yes" and found.get("appendfsync") != "always":
        reasons.append(f"it writes its log after the answer (appendfsync {found.get('appendfsync', '')})")
    policy = found.get("maxmemory-policy")
    if found.get("maxmemory", "0") != "0" and policy != "noeviction":
        reasons.append(f"it evicts keys when memory is short (maxmemory-policy {policy})")
    try:
        about = client.command("INFO", "replication", deadline=deadline, closed=closed)
    except (StoreError, AuthenticationError):
        return reasons
    if isinstance(about, bytes) and (replicas := _number_after(b"connected_slaves:", about)):
        reasons.append(f"its replicas ({replicas}) receive changes after the answer, and one may take over")
    return reasons


def _pairs(answer: Any) -> dict[str, str]:
    given = answer if isinstance(answer, list) else []
    texts = [each.decode(errors="replace") for each in given if isinstance(each, bytes)]
    return dict(zip(texts[::2], texts[1::2], strict=False))


def _number_after(word: bytes, text: bytes) -> int:
    number = text.partition(word)[2].split(b"\r\n")[0]
    return int(number) if number.isdigit() else 0
