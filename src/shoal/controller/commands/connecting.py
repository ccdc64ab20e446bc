"""The calls of a line to its node beside the log, and the mailboxes of further streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import ShoalError
from ...future import Future
from ...rpc import Peer
from ..node import sessions
from .line import NodeConnection, Send


def connect(line: NodeConnection, peer: Peer, session: str, streams: Any) -> None:
    """Let a line reach its worker, in a session that has these streams, or None."""
    line.call = partial(_called, peer, session)
    line.opens = partial(_opened, peer, session, line.index)
    line.ordering = streams


def disconnect(line: NodeConnection, why: ShoalError) -> None:
    """Let a line raise ``why``, and wait for nothing: this is a forked child."""
    line._end(why)
    for each in (line, *line.further):
        each.batches.clear()


def _called(peer: Peer, session: str, fn: Callable[..., Any], *args: Any) -> Future[Any]:
    return peer.call(fn, session, *args)


def _opened(peer: Peer, session: str, index: int, stream: int) -> Send:
    """A function that sends the batches of a further stream."""
    mailbox = peer.call(sessions.open_stream, session, stream, index).wait()
    return partial(peer.over_line(mailbox, sessions.run), session, stream)
