"""Calls to a node outside the log, and the mailboxes of further streams."""

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
    """Connect a `NodeConnection` to its worker; `streams` is None until the session has several."""
    line.call = partial(_called, peer, session)
    line.opens = partial(_opened, peer, session, line.index)
    line.ordering = streams


def disconnect(line: NodeConnection, why: ShoalError) -> None:
    """Make all uses of the node raise `why`, without waiting; for a forked child."""
    line._end(why)
    for each in (line, *line.further):
        each.batches.clear()


def _called(peer: Peer, session: str, fn: Callable[..., Any], *args: Any) -> Future[Any]:
    return peer.call(fn, session, *args)


def _opened(peer: Peer, session: str, index: int, stream: int) -> Send:
    """Open a further stream on the node; return the function that sends its batches."""
    mailbox = peer.call(sessions.open_stream, session, stream, index).wait()
    return partial(peer.bound_call(mailbox, sessions.run), session, stream)
