"""The protocol between a launcher and its agents on other hosts.

Every frame is a msgpack map with the name of its type under ``type``.  Types and bounds of fields are checked
here; whether a frame is valid in the current state is checked where it is handled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from ..common.decoding import Raw, msgpack_decoder
from ..errors import WireError
from ..failure_report import Report

#: version of the protocol, incremented when the meaning of a frame changes
PROTOCOL: Final = 4
#: written by an agent before its first frame, as the login shell may have written something before
PREAMBLE: Final = b"\x89shoal agent\r\n\x00"
#: maximum length of a frame in bytes
MAX_FRAME_BYTES: Final = 1 << 22
#: maximum number of bytes of an agent's output that the launcher has not consumed
OUTPUT_WINDOW_BYTES: Final = 4 << 20
#: maximum number of bytes of stdin that rank 0 has not consumed
STDIN_WINDOW_BYTES: Final = 1 << 16
#: maximum number of bytes of output or stdin in one frame
MAX_CHUNK_BYTES: Final = 1 << 16
#: seconds between two heartbeats, and seconds of silence after which the other side counts as lost
HEARTBEAT_INTERVAL_S: Final = 1.0
SILENCE_TIMEOUT_S: Final = 5.0
#: numbers of the streams of a process
STDOUT: Final = 1
STDERR: Final = 2

_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Data = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK_BYTES)]
_Words = Annotated[str, msgspec.Meta(max_length=2000)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=OUTPUT_WINDOW_BYTES)]
_Stream = Annotated[int, msgspec.Meta(ge=STDOUT, le=STDERR)]
_Number = Annotated[int, msgspec.Meta(ge=1, le=64)]


class AgentFrame(msgspec.Struct, frozen=True, tag=True):
    """One frame."""


# -- from the agent --------------------------------------------------------------------------------


class Hello(AgentFrame, frozen=True):
    """The first frame of an agent.

    Attributes:
        version, protocol: versions of shoal and of this protocol.
        launcher, address: addresses of the launcher's host and of the agent's host, taken from their
            connection; "" if unknown.
        port: a port that the agent keeps free on its host, for torch.distributed.
    """

    version: _Name
    protocol: int
    launcher: _Name
    address: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Ready(AgentFrame, frozen=True):
    """The agent has handled :class:`Begin`; ``error``: why it cannot."""

    error: _Words = ""


class Started(AgentFrame, frozen=True):
    """A process was started; ``error``: why it could not be."""

    index: _Index
    pid: Annotated[int, msgspec.Meta(ge=1)] | None
    error: _Words = ""


class ProcessOutput(AgentFrame, frozen=True):
    """Output of a process on :data:`STDOUT` or :data:`STDERR`; no bytes: the end."""

    index: _Index
    stream: _Stream
    data: _Data


class StdinTaken(AgentFrame, frozen=True):
    """``amount`` bytes of stdin were written to the rank, or dropped because it has closed its stdin."""

    amount: Annotated[int, msgspec.Meta(ge=0, le=STDIN_WINDOW_BYTES)]


class Reported(AgentFrame, frozen=True):
    """The reports of a process: all of failures so far, and notices since the last frame; see ``reports.py``.

    Times are in the agent's CLOCK_MONOTONIC.
    """

    index: _Index
    joined: bool
    reports: Annotated[tuple[Report, ...], msgspec.Meta(max_length=64)]
    notices: Annotated[tuple[Report, ...], msgspec.Meta(max_length=64)] = ()
    rebuilds: Annotated[int, msgspec.Meta(ge=0)] = 0


class Exited(AgentFrame, frozen=True):
    """A process has ended: its exit code or minus the number of the signal, when, and its run time.

    ``at`` is in seconds of the agent's CLOCK_MONOTONIC.
    """

    index: _Index
    status: Annotated[int, msgspec.Meta(ge=-64, le=255)]
    at: float
    seconds: float


class Bye(AgentFrame, frozen=True):
    """The last frame: all processes have ended, and all output was sent.  ``killed``: killed processes."""

    killed: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=1000)]


# -- from the launcher -----------------------------------------------------------------------------


class Preload(msgspec.Struct, frozen=True):
    """``--preload``: processes are forked from one that has imported ``modules``, and execute ``argv``."""

    argv: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    modules: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1)]


class Begin(AgentFrame, frozen=True):
    """The first frame of a launcher.

    Attributes:
        directory: working directory of the processes.
        environment: their variables, in addition to those of the agent.
        ranks: number of initial ranks on this host.
        bind: bind each slot to its own cores.
        preload: the agent is ready when the modules are imported.
    """

    directory: str
    environment: dict[str, str]
    ranks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    bind: bool
    preload: Preload | None = None


class Start(AgentFrame, frozen=True):
    """Start a process.

    Attributes:
        place: its number among the slots of this host.
        size: number of ranks of the job.
        variables: its variables, in addition to those of :class:`Begin`.
        stdin: pass the launcher's stdin to it; otherwise its stdin is empty.
    """

    index: _Index
    slot: _Index
    restart: _Index
    place: _Index
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    argv: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    variables: dict[str, str]
    newcomer: bool
    stdin: bool


class Taken(AgentFrame, frozen=True):
    """The launcher has consumed ``amount`` bytes of output."""

    amount: _Count


class Close(AgentFrame, frozen=True):
    """Close :data:`STDOUT` or :data:`STDERR` of a process, which is not read any more."""

    index: _Index
    stream: _Stream


class Signal(AgentFrame, frozen=True):
    """Send a signal to a process, or to its whole group."""

    index: _Index
    number: _Number
    group: bool


class StdinData(AgentFrame, frozen=True):
    """Bytes of the launcher's stdin; no bytes: the end."""

    data: _Data


class Release(AgentFrame, frozen=True):
    """Kill the process group of an ended process, and forget it."""

    index: _Index


class End(AgentFrame, frozen=True):
    """All processes have ended: kill their process groups after ``linger`` seconds, then send Bye."""

    linger: Annotated[float, msgspec.Meta(ge=0, le=60)]


class Suspend(AgentFrame, frozen=True):
    """The launcher is about to be suspended, as by Ctrl-Z, and sends nothing until it is continued."""


# -- from both -------------------------------------------------------------------------------------


class Beat(AgentFrame, frozen=True):
    """A heartbeat: the launcher sends one each second, and the agent replies with its own clock.

    Both times are in seconds of CLOCK_MONOTONIC.
    """

    launcher: float
    agent: float = 0.0


FromAgent = Hello | Ready | Started | ProcessOutput | StdinTaken | Reported | Exited | Bye | Beat
FromLauncher = Begin | Start | Taken | Close | Signal | StdinData | Release | End | Suspend | Beat


#: decoders of frames from agents and from launchers; they raise MalformedMessage
decode_from_agent: Callable[[Raw], FromAgent] = msgpack_decoder(FromAgent)
decode_from_launcher: Callable[[Raw], FromLauncher] = msgpack_decoder(FromLauncher)


def encode(frame: AgentFrame) -> bytes:
    """Encode a frame; raises WireError if it is longer than the other side accepts."""
    data = msgspec.msgpack.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        name = type(frame).__name__
        raise WireError(f"a {name} frame of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
    return data
