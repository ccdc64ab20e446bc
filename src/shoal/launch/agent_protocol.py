"""What a launcher and its agents on other hosts say to each other.

Every frame is a msgpack map with its type's name under ``type``.  Both sides check what they get: the types
and bounds of fields here, and what only they can know (whether there is such a rank, and what it may do
now) where the frame is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from ..common.decoding import Raw, msgpack_decoder
from ..errors import WireError
from ..failure_report import Report

#: counted up whenever a frame changes its meaning
PROTOCOL: Final = 2
#: what an agent writes before its first frame: the shell of the other host may have said something before
PREAMBLE: Final = b"\x89shoal agent\r\n\x00"
#: longest frame in bytes
LIMIT: Final = 1 << 22
#: so many bytes of output may be on their way from an agent, unread by the launcher's own reader
WINDOW: Final = 4 << 20
#: so many bytes of stdin may be on their way to rank 0
STDIN_WINDOW: Final = 1 << 16
#: bytes in one frame
MOST_BYTES: Final = 1 << 16
#: seconds between two beats, and seconds of silence after which the other side is lost
BEAT: Final = 1.0
SILENCE: Final = 5.0

_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Data = Annotated[bytes, msgspec.Meta(max_length=MOST_BYTES)]
_Words = Annotated[str, msgspec.Meta(max_length=2000)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=WINDOW)]
_Stream = Annotated[int, msgspec.Meta(ge=1, le=2)]
_Number = Annotated[int, msgspec.Meta(ge=1, le=64)]


class _Frame(msgspec.Struct, frozen=True, tag=True):
    """One frame."""


# -- from the agent --------------------------------------------------------------------------------


class Hello(_Frame, frozen=True):
    """The first frame of an agent.

    Attributes:
        version, protocol: of its shoal.
        launcher, address: the addresses of the launcher's host and of this one, as their connection knows
            them; "" where nothing tells.
        port: a port that the agent keeps free on its host, for torch.distributed.
    """

    version: _Name
    protocol: int
    launcher: _Name
    address: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Ready(_Frame, frozen=True):
    """It has done what :class:`Begin` asks for."""


class RequestRefused(_Frame, frozen=True):
    """It cannot do that."""

    text: _Words


class Started(_Frame, frozen=True):
    """A process runs."""

    index: _Index
    pid: Annotated[int, msgspec.Meta(ge=1)]


class NotStarted(_Frame, frozen=True):
    """A process could not be started."""

    index: _Index
    text: _Words


class ProcessOutput(_Frame, frozen=True):
    """What a process wrote to stdout (1) or stderr (2); no bytes: the end."""

    index: _Index
    stream: _Stream
    data: _Data


class StdinTaken(_Frame, frozen=True):
    """So many bytes of stdin were given to the rank, or dropped if it has closed it."""

    amount: Annotated[int, msgspec.Meta(ge=0, le=STDIN_WINDOW)]


class Reported(_Frame, frozen=True):
    """The reports of a process, in the agent's CLOCK_MONOTONIC.

    Attributes:
        reports: all that it has sent of its failure so far.
        notices: those of meetings and evictions since the last frame.
    """

    index: _Index
    joined: bool
    reports: Annotated[tuple[Report, ...], msgspec.Meta(max_length=64)]
    notices: Annotated[tuple[Report, ...], msgspec.Meta(max_length=64)] = ()


class Exited(_Frame, frozen=True):
    """A process has ended.

    Attributes:
        status: exit code, or minus the number of the signal.
        at: when, in the agent's CLOCK_MONOTONIC.
        seconds: how long it ran.
    """

    index: _Index
    status: Annotated[int, msgspec.Meta(ge=-64, le=255)]
    at: float
    seconds: float


class Bye(_Frame, frozen=True):
    """The last frame: everything has ended, and all output was sent.  ``killed``: what had to be killed."""

    killed: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=1000)]


# -- from the launcher -----------------------------------------------------------------------------


class Begin(_Frame, frozen=True):
    """The first frame of a launcher.

    Attributes:
        directory: in which the processes run.
        environment: what they find beside what the agent does.
        ranks: how many of those that meet first are this host's.
        bind: give each slot cores of its own.
    """

    directory: str
    environment: dict[str, str]
    ranks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    bind: bool


class Start(_Frame, frozen=True):
    """Start a process.

    Attributes:
        place: its number among this host's slots.
        size: number of ranks of the job.
        variables: its own, beside those of :class:`Begin`.
        stdin: it gets what the launcher's stdin has; otherwise nothing.
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


class Taken(_Frame, frozen=True):
    """So many more bytes of output may be sent."""

    amount: _Count


class Close(_Frame, frozen=True):
    """Nobody reads stdout (1) or stderr (2) of a process any more."""

    index: _Index
    stream: _Stream


class Signal(_Frame, frozen=True):
    """Send a signal to a process, or to its whole group."""

    index: _Index
    number: _Number
    group: bool


class StdinData(_Frame, frozen=True):
    """What the launcher's stdin had; no bytes: the end."""

    data: _Data


class Release(_Frame, frozen=True):
    """Kill what an ended process left in its group, and forget it."""

    index: _Index


class End(_Frame, frozen=True):
    """All processes have ended: what they left in their groups may live so many seconds; then say Bye."""

    linger: Annotated[float, msgspec.Meta(ge=0, le=60)]


class Suspend(_Frame, frozen=True):
    """The launcher is about to be stopped, as by Ctrl-Z: it sends nothing until it is continued."""


# -- from both -------------------------------------------------------------------------------------


class Beat(_Frame, frozen=True):
    """The launcher sends one each second, and the agent sends it back with its own clock.

    Both are seconds of CLOCK_MONOTONIC.
    """

    launcher: float
    agent: float = 0.0


FromAgent = (
    Hello
    | Ready
    | RequestRefused
    | Started
    | NotStarted
    | ProcessOutput
    | StdinTaken
    | Reported
    | Exited
    | Bye
    | Beat
)
FromLauncher = Begin | Start | Taken | Close | Signal | StdinData | Release | End | Suspend | Beat


#: decode the frames of agents and of launchers; raise MalformedMessage
decode_from_agent: Callable[[Raw], FromAgent] = msgpack_decoder(FromAgent)
decode_from_launcher: Callable[[Raw], FromLauncher] = msgpack_decoder(FromLauncher)


def encode(frame: _Frame) -> bytes:
    """A frame as bytes; raises WireError if it would be longer than the other side accepts."""
    data = msgspec.msgpack.encode(frame)
    if len(data) > LIMIT:
        raise WireError(
            f"a {type(frame).__name__} of {len(data)} bytes: at most {LIMIT} are sent to an agent"
        )
    return data
