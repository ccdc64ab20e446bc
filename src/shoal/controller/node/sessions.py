"""The sessions of masters on a node: the functions that a master calls there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...errors import AgentClosed
from ...rpc import Agent, current
from ..protocol.commands import Segment
from ..protocol.workers import import_all
from . import accelerators, peers
from .execute import SpaceExecutor
from .history import BatchReply, Event, Poison, Timing
from .place_groups import PlaceGroups
from .session_state import SessionEnded, SessionState

#: the reply to a batch: requested values, and failures
Reply = tuple[list[Any], list[tuple[Any, ...]]]


class _SessionStream:
    """One stream of a session, with its own `mailbox`; the mailbox's thread runs the batches in order."""

    def __init__(self, number: int, state: SessionState, agent: Agent) -> None:
        self._number = number
        self._state = state
        self._spaces: dict[int, SpaceExecutor] = {}
        self.reply = BatchReply(number, state.poisons, SpaceExecutor.run.__code__)
        self._batches = 0
        self._executor = agent.executor
        self.mailbox = agent.references.objects.new_mailbox()
        self._executor.start_mailbox(self.mailbox)

    def run(self, segments: Sequence[Segment]) -> Reply:
        """Execute the segments of a batch in order."""
        reply = self.reply
        reply.begin(self._batches)
        self._batches += 1
        with ExitStack() as stack:
            for cuda_streams in self._state.cuda_streams(self._number):
                stack.enter_context(torch.cuda.stream(cuda_streams))
            for reply.segment, (space, _, numbers, scalars, high, payloads) in enumerate(segments):
                tensors = self._spaces.get(space)
                if tensors is None:
                    tensors = self._spaces[space] = SpaceExecutor(reply, self._state, space)
                tensors.run(numbers, scalars, high, payloads)
        return reply.values, [tuple(failure) for failure in reply.failures]

    def forget(self, space: int) -> None:
        """Forget a space that gets no more commands."""
        self._spaces.pop(space, None)

    def end(self) -> None:
        """Release the mailbox: no more batches are accepted."""
        self._executor.release(self.mailbox)


class _Session:
    """A master's session on this node.

    Attributes:
        state: state shared by the streams.
        streams: streams by number; 0 is the default stream.
    """

    def __init__(self, epoch: int) -> None:
        self.state = SessionState(epoch)
        self.streams: dict[int, _SessionStream] = {}
        self.open(0)
        current().agent.recorder.extra_fields["nodes"] = _nodes

    def open(self, number: int) -> int:
        """Create a stream; return the number of its mailbox."""
        made = self.streams[number] = _SessionStream(number, self.state, current().agent)
        return made.mailbox

    def end(self) -> None:
        self.state.end()
        for each in self.streams.values():
            each.end()


_sessions: dict[str, _Session] = {}


def _nodes() -> list[dict[str, Any]]:
    """Return the last commands of this process's sessions, for a dump."""
    found = []
    for name, each in list(_sessions.items()):
        for number, stream in list(each.streams.items()):
            done, runs = stream.reply.recent.commands()
            found.append({"session": name, "stream": number, "commands": done, "runs": runs})
    return found


def begin(
    session: str,
    index: int,
    epoch: int,
    backend: str,
    options: dict[str, str],
    members: dict[int, peers.Member],
    imports: Sequence[str] = (),
) -> tuple[int, int, int]:
    """Create an empty session; raises `UsageError` if a module cannot be imported.

    Args:
        index: index of this node.
        epoch: number of earlier workers with this index.
        backend, options: data channel of the groups, and its options.
        members: the other nodes, by index.
        imports: names of modules to import.

    Returns:
        the mailbox of the default stream, the number of GPUs, and the device where tensors are created.
    """
    import_all(imports, f"node {index}")
    if session in _sessions:  # the master was interrupted before it got the reply
        end(session)
    others = peers.Peers(session, index, epoch, current().agent, members)
    others.groups = PlaceGroups(others, backend, options)
    peers.enter(others)
    begun = _sessions[session] = _Session(epoch)
    return begun.streams[0].mailbox, accelerators.count(), accelerators.chosen()


def open_stream(session: str, stream: int, node: int) -> int:
    """Create a further stream on node `node`; return the number of its mailbox."""
    held = _sessions[session]
    held.state.open(stream, node)
    return held.open(stream)


def run(session: str, stream: int, segments: Sequence[Segment]) -> Reply:
    """Execute a batch of a stream; called in order. Raises `AgentClosed` if the session ended meanwhile."""
    try:
        return _sessions[session].streams[stream].run(segments)
    except SessionEnded:
        raise AgentClosed("the session ended while a stream was waiting") from None


def forget(session: str, space: int, streams: Sequence[int]) -> None:
    """Forget a space that is no longer used, and end its streams."""
    held = _sessions[session]
    for number in streams:
        held.streams.pop(number).end()
    for each in list(held.streams.values()):
        each.forget(space)
    held.state.forget(space, streams)


def notify(session: str, number: int) -> None:
    """Resume a stream that expects this number."""
    _sessions[session].state.notify(number)


def event_reached(session: str, space: int, id: int, wait: bool) -> bool:
    """Return whether the GPUs have reached an event; with `wait`, wait for that."""
    return _mark(session, space, id).reached(wait)


def elapsed(session: str, space: int, first: int, other: int, second: int) -> float:
    """Return the milliseconds from event `first` of a space to event `second` of the space `other`."""
    return _mark(session, space, first).elapsed(_mark(session, other, second))


def _mark(session: str, space: int, id: int) -> accelerators.NodeEvent:
    mark = _sessions[session].state.tensors(space)[id]
    assert isinstance(mark, accelerators.NodeEvent)
    return mark


def begin_timing(session: str) -> None:
    """Start to collect the times of the following commands of all streams."""
    _sessions[session].state.timing = Timing()


def end_timing(session: str) -> tuple[list[Event], int]:
    """Stop collecting; return the commands with their times, and the number of dropped older ones."""
    state = _sessions[session].state
    timing, state.timing = state.timing, None
    return ([], 0) if timing is None else timing.collected()


def now(session: str) -> int:
    """Return this process's clock in nanoseconds."""
    return time.monotonic_ns()


def poison_of(session: str, space: int, id: int) -> tuple[int, tuple[int, int] | None] | None:
    """Return the failure that poisoned a tensor, outside the order of the log; None if it is not poisoned.

    The failure is its number, and the node and number of its cause if that is on another node.
    """
    tensors = _sessions[session].state.tensors(space)
    found = tensors[id] if id < len(tensors) else None
    return (found.failure.poison, found.failure.of) if isinstance(found, Poison) else None


def begun() -> bool:
    return bool(_sessions)


def end(session: str) -> None:
    """End a session and release its tensors."""
    _sessions.pop(session).end()
    peers.leave(session)


def end_all() -> None:
    for session in list(_sessions):
        end(session)
