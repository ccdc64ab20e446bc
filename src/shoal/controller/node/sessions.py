"""The functions of a session, which a master calls at a worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...errors import AgentClosed
from ...rpc import current
from ..protocol.commands import Segment
from ..protocol.imports import import_all
from . import accelerators, peers, teams
from .execute import Tensors
from .mark import Mark
from .memory import NodeMemory, SessionEnded
from .outcome import BatchReply, Poison
from .trace import Event, Timing

#: what a batch gives: what was fetched or asked, and what failed
Reply = tuple[list[Any], list[tuple[Any, ...]]]


class _SessionStream:
    """One stream of a session; its batches come to a mailbox of its own, whose thread runs them in order.

    Attributes:
        mailbox: its number.
        outcome: of its batches.
    """

    def __init__(self, number: int, memory: NodeMemory, agent: Any) -> None:
        self._number = number
        self._memory = memory
        self._spaces: dict[int, Tensors] = {}
        self.outcome = BatchReply(number, memory.poisons, Tensors.run.__code__)
        self._batches = 0
        self._executor = agent.executor
        self.mailbox: int = agent.references.ledger.new_mailbox()
        self._executor.consume(self.mailbox)

    def run(self, segments: Sequence[Segment]) -> Reply:
        """Execute the segments of a batch in their order."""
        outcome = self.outcome
        outcome.begin(self._batches)
        self._batches += 1
        with ExitStack() as stack:
            for enqueues in self._memory.enqueues(self._number):
                stack.enter_context(torch.cuda.stream(enqueues))
            for outcome.segment, (space, _, numbers, scalars, high, payloads) in enumerate(segments):
                tensors = self._spaces.get(space)
                if tensors is None:
                    made = Tensors(torch.device("cpu"), outcome, self._memory, space, self._number)
                    tensors = self._spaces[space] = made
                tensors.run(numbers, scalars, high, payloads)
        return outcome.values, [tuple(failure) for failure in outcome.failures]

    def forget(self, space: int) -> None:
        """Forget a space, whose commands have all come."""
        self._spaces.pop(space, None)

    def end(self) -> None:
        """Take no more batches."""
        self._executor.release(self.mailbox)


class _Session:
    """One master's session here.

    Attributes:
        memory: what its streams share.
        streams: by number; 0 is the default one.
        timing: of all commands, while there is a trace.
    """

    def __init__(self, epoch: int) -> None:
        self.memory = NodeMemory(epoch)
        self.streams: dict[int, _SessionStream] = {}
        self.timing: Timing | None = None
        self.open(0)
        current().agent.recorder.also["nodes"] = _nodes

    def open(self, number: int) -> int:
        """Make a stream; the number of the mailbox that its batches go to."""
        made = self.streams[number] = _SessionStream(number, self.memory, current().agent)
        made.outcome.timing = self.timing
        return made.mailbox

    def time(self, timing: Timing | None) -> Timing | None:
        """Note the times of commands from now on there, or nowhere; where they were noted before."""
        before, self.timing = self.timing, timing
        for each in list(self.streams.values()):
            each.outcome.timing = timing
        return before

    def end(self) -> None:
        """End its streams."""
        self.memory.end()
        for each in self.streams.values():
            each.end()


_sessions: dict[str, _Session] = {}


def _nodes() -> list[dict[str, Any]]:
    """The last commands of the nodes of this process, for a dump."""
    told = []
    for name, each in list(_sessions.items()):
        for number, stream in list(each.streams.items()):
            done, runs = stream.outcome.recent.commands()
            told.append({"session": name, "stream": number, "commands": done, "runs": runs})
    return told


def begin(
    session: str,
    index: int,
    epoch: int,
    backend: str,
    options: dict[str, str],
    members: dict[int, peers.Member],
    imports: Sequence[str] = (),
) -> tuple[int, int, int]:
    """Make an empty session.

    Args:
        index: of this node.
        epoch: how many workers had the index before.
        backend, options: of the data channel of groups.
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
    others = peers.Peers(session, index, epoch, current().agent, members)
    peers.enter(others)
    teams.enter(others, backend, options)
    begun = _sessions[session] = _Session(epoch)
    return begun.streams[0].mailbox, accelerators.count(), accelerators.chosen()


def open_stream(session: str, stream: int, node: int) -> int:
    """Make a further stream, on the node of this index; the number of its mailbox."""
    held = _sessions[session]
    held.memory.open(stream, node)
    return held.open(stream)


def run(session: str, stream: int, segments: Sequence[Segment]) -> Reply:
    """Execute a batch of a session's stream; called in the order of the batches.

    Raises:
        AgentClosed: the session has ended meanwhile.
    """
    try:
        return _sessions[session].streams[stream].run(segments)
    except SessionEnded:
        raise AgentClosed("the session has ended, and what a stream waited for does not come") from None


def forget(session: str, space: int, streams: Sequence[int]) -> None:
    """Forget a space, of which nothing comes any more, and end streams of it."""
    held = _sessions[session]
    for number in streams:
        held.streams.pop(number).end()
    for each in list(held.streams.values()):
        each.forget(space)
    held.memory.forget(space, streams)


def tell(session: str, number: int) -> None:
    """Let a stream that expects this number go on."""
    _sessions[session].memory.tell(number)


def passed(session: str, space: int, id: int, wait: bool) -> bool:
    """Whether GPUs have done all that was enqueued before an event; wait for it, if so wanted."""
    return _mark(session, space, id).passed(wait)


def elapsed(session: str, space: int, first: int, other: int, second: int) -> float:
    """Milliseconds from the event ``first`` of a space to the event ``second`` of the ``other`` space."""
    return _mark(session, space, first).elapsed(_mark(session, other, second))


def _mark(session: str, space: int, id: int) -> Mark:
    mark = _sessions[session].memory.tensors(space)[id]
    assert isinstance(mark, Mark)
    return mark


def begin_timing(session: str) -> None:
    """Note the times of all commands, of all streams, that come after this one."""
    _sessions[session].time(Timing())


def end_timing(session: str) -> tuple[list[Event], int]:
    """The commands since then with their times, and how many more there were before; note no more."""
    timing = _sessions[session].time(None)
    return ([], 0) if timing is None else timing.told()


def poison_of(session: str, space: int, id: int) -> tuple[int, tuple[int, int] | None] | None:
    """The failure because of which a tensor is not there, aside from the session's order; None: it is there.

    Returns:
        its number, and, if it is known on another node why, that node and the number there.
    """
    tensors = _sessions[session].memory.tensors(space)
    found = tensors[id] if id < len(tensors) else None
    return (found.failure.poison, found.failure.of) if isinstance(found, Poison) else None


def begun() -> bool:
    """Whether a master has begun a session here."""
    return bool(_sessions)


def end(session: str) -> None:
    """Let go of all tensors of a session."""
    _sessions.pop(session).end()
    peers.leave(session)
    teams.leave(session)


def end_all() -> None:
    """Let go of all sessions."""
    for session in list(_sessions):
        end(session)
