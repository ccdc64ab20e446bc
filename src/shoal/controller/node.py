"""The functions of a session, which a master calls at a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rpc import current
from . import accelerators, peers, teams
from .commands import Segment
from .execute import Poison, Spaces
from .imports import import_all


class _Session:
    """One master's session here; its batches come to a mailbox of its own, whose thread runs them in order.

    Attributes:
        mailbox: its number.
        spaces: the tensors of each.
    """

    def __init__(self, agent: Any) -> None:
        self._executor = agent.executor
        self.mailbox: int = agent.references.ledger.new_mailbox()
        self.spaces = Spaces(torch.device("cpu"))
        self._executor.consume(self.mailbox)
        self._also: dict[str, Any] = agent.recorder.also
        self._also["nodes"] = _nodes

    def run(self, segments: Sequence[Segment]) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """Execute the segments of a batch in their order."""
        outcome = self.spaces.outcome
        outcome.begin()
        for outcome.segment, (space, _, numbers, scalars, high, payloads) in enumerate(segments):
            self.spaces[space].run(numbers, scalars, high, payloads)
        return outcome.values, [tuple(failure) for failure in outcome.failures]

    def end(self) -> None:
        """Take no more batches."""
        self._executor.release(self.mailbox)


_sessions: dict[str, _Session] = {}


def _nodes() -> list[dict[str, Any]]:
    """What the nodes of this process did last, for a dump."""
    told = []
    for name, each in list(_sessions.items()):
        done, runs = each.spaces.outcome.recent.commands()
        told.append({"session": name, "commands": done, "runs": runs})
    return told


def begin(
    session: str,
    index: int,
    epoch: int,
    backend: str,
    members: dict[int, peers.Member],
    imports: Sequence[str] = (),
) -> tuple[int, int, int]:
    """Make an empty session.

    Args:
        index: of this node.
        epoch: how many workers had the index before.
        backend: name of the data channel of groups.
        members: the other nodes, by their indices.
        imports: names of modules.

    Returns:
        the number of the mailbox that its batches go to, how many GPUs the node has, and on which of its
        devices tensors are made.

    Raises:
        UsageError: a module cannot be imported.
    """
    import_all(imports, f"node {index}")
    if session in _sessions:  # the master was interrupted before it knew that
        end(session)
    agent = current().agent
    others = peers.Peers(session, index, epoch, agent, members)
    peers.enter(others)
    teams.enter(others, backend)
    begun = _sessions[session] = _Session(agent)
    return begun.mailbox, accelerators.count(), accelerators.chosen()


def run(session: str, segments: Sequence[Segment]) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Execute a batch of a session; called in the order of the batches.

    Returns:
        what was fetched or asked, and what failed.
    """
    return _sessions[session].run(segments)


def poison_of(session: str, space: int, id: int) -> tuple[int, tuple[int, int] | None] | None:
    """The failure because of which a tensor is not there, aside from the session's order; None: it is there.

    Returns:
        its number, and, if it is known on another node why, that node and the number there.
    """
    spaces = _sessions[session].spaces
    tensors = spaces[space].tensors if space in spaces else []
    found = tensors[id] if id < len(tensors) else None
    return (found.number, found.of) if isinstance(found, Poison) else None


def end(session: str) -> None:
    """Let go of all tensors of a session."""
    _sessions.pop(session).end()
    peers.leave(session)
    teams.leave(session)


def end_all() -> None:
    """Let go of all sessions."""
    for session in list(_sessions):
        end(session)
