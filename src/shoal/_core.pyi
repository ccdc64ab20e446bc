"""The native module, as far as Python uses it; the classes are described in ``cpp/``."""

import enum
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from threading import Lock
from types import CodeType, FrameType
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from .future import Future
from .future.state import FutureSource
from .spec import OpKind
from .streams import DeviceEvents

# -- cpp/ddp ------------------------------------------------------------------------------------

BUCKET_ALIGNMENT: int

def assign_buckets(
    bytes: Sequence[int], kinds: Sequence[int], order: Sequence[int], first_cap: int, cap: int
) -> list[tuple[list[int], list[int], int]]: ...
def gradient_hook(
    pass_: Pass,
    parameter: int,
    views: list[Tensor],
    addresses: list[int],
    as_view: bool,
    arrived: Callable[[int, Mark, bool], None],
) -> Callable[[Tensor], None]: ...
def values_are(dictionaries: list[Any], values: list[object]) -> bool: ...

OUTCOME: int

class Mark(enum.Enum):
    """What follows from the arrival of a gradient."""

    IGNORED = ...  # no pass is open: the gradient is not reduced
    ARRIVED = ...  # it is recorded; nothing else is to do
    PROCEED = ...  # it was the first of its pass, or more buckets are ready
    UNEXPECTED = ...  # it had arrived as often as expected

class PassEnd(enum.Enum):
    """How a pass ended."""

    NOTHING = ...  # no gradient arrived; the expected pass may still come
    WELL = ...  # the averages are delivered
    TROUBLE = ...  # gradients are missing on some rank, or ranks are in different steps

class _Actions(Protocol):
    def fill(self, bucket: int) -> bool: ...
    def send(self, bucket: int) -> None: ...
    def wait(self, bucket: int) -> None: ...
    def deliver(self, used: list[bool]) -> None: ...

class Pass:
    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        expected: Sequence[int],
        *,
        find_unused: bool = False,
        learn: bool = False,
        fill_all: bool = False,
        copies: int = 1,
    ) -> None: ...
    def rebuild(self, buckets: Sequence[Sequence[int]], expected: Sequence[int]) -> None: ...
    separate: bool
    def expect(self, counts: bool, copies: int) -> None: ...
    def ignore(self) -> None: ...
    def open(self) -> None: ...
    def mark(self, parameter: int) -> Mark: ...
    def begin(self, actions: _Actions, unreached: Sequence[int]) -> None: ...
    def launch(self, actions: _Actions) -> None: ...
    def finish(self, actions: _Actions, interrupted: bool = False, shadow: bool = False) -> PassEnd: ...
    def tail(self) -> list[float]: ...
    def flags(self, present: Sequence[bool]) -> list[int]: ...
    def decode_tail(self, mean: Sequence[float], epsilon: float) -> None: ...
    def decode_flags(self, maximum: Sequence[int]) -> None: ...
    def close(self) -> None: ...
    def take_order(self) -> list[int] | None: ...
    @property
    def opened(self) -> bool: ...
    @property
    def gaps(self) -> bool: ...
    @property
    def number(self) -> int: ...
    @property
    def extra(self) -> int: ...
    @property
    def expected(self) -> list[int]: ...
    @property
    def ready(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    def counts(self) -> list[int]: ...
    def missing(self) -> list[int]: ...

# -- cpp/engine ---------------------------------------------------------------------------------

def learn_tensors(tensor_class: type[Tensor]) -> None: ...
def learn_calls(scope: ContextVar[Any], dtypes: tuple[torch.dtype, ...], max_tag: int) -> None: ...
def learn_futures(future_class: type[Future[Any]], wait: Callable[..., Any]) -> None: ...

class ErrorCode(enum.Enum):
    PEER_LOST = ...
    MISMATCH = ...
    TIMEOUT = ...
    ABORTED = ...
    CLOSED = ...
    OUT_OF_MEMORY = ...
    FORKED = ...
    WIRE = ...
    CANCELLED = ...

class Kind(enum.Enum):
    """The kind of an operation; the names and values are those of :class:`shoal.spec.OpKind`."""

    ALL_REDUCE = ...
    REDUCE = ...
    BROADCAST = ...
    ALL_GATHER = ...
    REDUCE_SCATTER = ...
    GATHER = ...
    SCATTER = ...
    ALL_TO_ALL = ...
    BARRIER = ...
    SEND = ...
    RECV = ...

class Fault(enum.Enum):
    """A point where a process can be made to die, for tests."""

    NONE = ...
    WRITING = ...
    REDUCED = ...
    FINISHED = ...
    GAVE_UP = ...

class AgreementOutcome(enum.Enum):
    """The names are those of :class:`shoal.backend.agreement.AgreementOutcome`."""

    OPEN = ...
    DECIDED = ...
    LEFT_OUT = ...
    NO_QUORUM = ...
    CLOSED = ...

class AgreementOp(enum.Enum):
    """The names are those of :class:`shoal.backend.agreement.AgreementOp`."""

    DIFFERS = ...
    AND = ...
    OR = ...
    MIN = ...
    MAX = ...
    SUM = ...
    COMMON = ...
    GATHER = ...
    REBUILD = ...
    GROW = ...

class Error:
    """Why a group or an operation failed, see ``cpp/engine/error.h``."""

    code: ErrorCode
    ranks: list[int]
    completed: int
    def explain(self, rank: int, group: str) -> str: ...
    def caused_by_others(self, rank: int) -> bool: ...

class Message:
    """A received message; ``data`` is None if the receive had a buffer."""

    data: Any
    source: int
    tag: int
    dtype: int
    dims: list[int]

class AgreementNews:
    """The state of an agreement."""

    outcome: AgreementOutcome
    op: AgreementOp | None
    value: bytes
    called: list[AgreementOp]
    ranks: list[int]
    ballot: int | None
    proposal: bytes | None

class Operation:
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...
    def error(self) -> Error | None: ...
    def announce(self, ticket: int) -> bool: ...
    def cancel(self) -> bool: ...
    def met(self) -> bool: ...
    def wait_met(self, timeout: float) -> bool: ...
    def finish_external(self) -> None: ...
    def abandoned(self) -> bool: ...
    def received(self) -> Message: ...

class Record:
    """The flight recorder's record of one operation, see :class:`shoal.recorder.Entry`."""

    submitted: int
    ended: int
    number: int
    key: int
    count: int
    tag: int
    root: int
    peer: int
    kind: OpKind
    dtype: torch.dtype | None
    future: ReferenceType[Any]
    failure: str | None

    def __init__(
        self,
        future: object,
        kind: OpKind,
        number: int,
        key: int,
        dtype: torch.dtype | None,
        count: int,
        root: int = -1,
        peer: int = -1,
        tag: int = -1,
    ) -> None:
        """Record an operation that is submitted now; ``future`` is referenced weakly."""

class FutureFields:
    """The fields of :class:`shoal.future.state.FutureState`, which the core reads and writes.

    Attributes:
        _claims: one list for each thread that met the completion; the thread of the first one publishes the
            outcome.
        _subscribers: called on completion, in order.  If not None, the source was asked to notify.
    """

    _claims: list[list[Any]]
    _source: FutureSource | None
    _finish: Callable[[], Any] | None
    _value: Any
    key: int | None
    _keep: object
    _device: DeviceEvents | None
    _error: BaseException | None
    _subscribers: list[Callable[[Any], None]] | None
    record: Record | None
    _callbacks: int
    _done: bool

class Source:
    def __init__(self, channel: object, operation: Operation, keep: object) -> None: ...
    def wait(self, timeout: float | None) -> bool: ...
    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def cancel(self) -> bool: ...
    def notify(self, fn: Callable[[], None]) -> None: ...
    def ended(self) -> int: ...

class Shortcut:
    number: int
    open: bool
    sends: bool
    receives: bool
    def __init__(
        self,
        group: Group,
        channel: object,
        lock: Lock,
        ident: int,
        append: Callable[[Record], None] | None,
    ) -> None: ...
    def submit(
        self,
        kind: OpKind,
        x: Tensor | Sequence[Tensor] | None,
        out: Tensor | Sequence[Tensor] | None,
        op: int,
        root: int,
        timeout: float,
        /,
    ) -> Future[Any] | None: ...
    def message(
        self, kind: OpKind, x: Tensor | None, peer: int, tag: int, timeout: float, /
    ) -> Future[Any] | None: ...
    def accepts(self, kind: OpKind, x: Tensor | None, peer: int, tag: int, timeout: float, /) -> bool: ...
    def detach(self) -> None: ...

class Group:
    def collective(
        self,
        kind: int,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        count: int,
        dtype: int,
        op: int,
        root: int,
        sizes: Sequence[int],
        number: int,
        key: int,
        timeout: float,
    ) -> Operation: ...
    def external(
        self,
        kind: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        sizes: Sequence[int],
        number: int,
        key: int,
        timeout: float,
        on_device: bool,
    ) -> Operation: ...
    def message(
        self,
        kind: int,
        part: Sequence[tuple[int, int]],
        peer: int,
        tag: int,
        dtype: int,
        dims: Sequence[int],
        timeout: float,
    ) -> Operation: ...
    def broken(self) -> bool: ...
    def abandoned(self) -> bool: ...
    def failure(self) -> Error | None: ...
    def abort(self, reason: str) -> None: ...
    def last_completed(self) -> int: ...
    def statistics(self) -> Statistics: ...
    def pending(self) -> int: ...
    def fence(self, ranks: list[int], timeout: float) -> list[int]: ...
    def vote_limit(self) -> int: ...
    def agree(self, op: AgreementOp, value: bytes, timeout: float) -> int | None: ...
    def agreed(self, number: int, timeout: float) -> AgreementNews: ...
    def ask_witness(self, ballot: int, proposal: bytes | None, kept: bytes) -> bytes | None: ...
    def tell_witness(self, number: int, ballot: int, proposal: bytes | None, kept: bytes) -> None: ...
    def losses(self) -> tuple[list[int], list[int]]: ...
    def begin_close(self) -> None: ...
    def close(self, timeout: float) -> None: ...
    def allocate(self, bytes: int) -> Any: ...

def algorithm_for(kind: OpKind, members: int, bytes: int, wide: int, at_once: bool) -> str: ...
def at_once_limit(members: int) -> int: ...

class Context:
    @staticmethod
    def make(
        rank: int,
        size: int,
        local_size: int,
        capacity: int,
        limit: int,
        heartbeat: float,
        patient: bool = False,
        job: str = "",
        world: Any = None,
        world_ranks: list[int] = ...,
        progress_threads: int = 1,
    ) -> Context: ...
    @property
    def memory_fd(self) -> int: ...
    @property
    def memory_capacity(self) -> int: ...
    @property
    def memory_in_use(self) -> int: ...
    @property
    def memory_warm(self) -> int: ...
    def trim(self) -> None: ...
    def make_ring(self) -> int: ...
    def add_local(
        self, peer: int, socket: int, memory_fd: int, capacity: int, out: int, in_: int, pid: int
    ) -> None: ...
    def add_remote(self, peer: int, socket: int) -> None: ...
    def start(self) -> None: ...
    def group(
        self,
        ident: int,
        name: str,
        rank: int,
        ranks: Sequence[int],
        hosts: Sequence[int],
        lanes: int,
        pairwise: bool = False,
        vote_timeout: float = 10.0,
        believing: bool = False,
        moved: bool = False,
        algorithm: int = 0,
    ) -> Group: ...
    def use(self, library: MpiLibrary) -> None: ...
    def completions(self, timeout: float) -> list[int]: ...
    def trace(self, on: bool) -> None: ...
    def take_trace(self) -> tuple[bytes, int]: ...
    def close(self, timeout: float) -> None: ...
    def program_ends(self) -> None: ...
    def disown(self) -> None: ...
    def lost(self) -> list[int]: ...
    def disconnect(self, peer: int) -> None: ...
    def held(self) -> tuple[int, int, int, int]: ...
    def totals(self) -> Statistics: ...
    def pause_heartbeats(self, silent: bool) -> None: ...
    def die_at(self, point: Fault) -> None: ...

# -- cpp/python/statistics.cc -----------------------------------------------------------------------

#: least latency of each bucket of :attr:`Statistics.latencies`, in nanoseconds
LATENCIES: tuple[int, ...]

def latency_quantile(counts: Sequence[int], share: float) -> float: ...

class LateMember:
    """A member that a rank waited for.

    Attributes:
        times: number of completed operations in which it arrived last.
        waited: nanoseconds.
    """

    rank: int
    times: int
    waited: int

class Statistics:
    """Counters of the operations of a group, see ``cpp/engine/statistics.h``."""

    completed: int
    failed: int
    bytes: int
    waits: int
    waited: int
    late: list[LateMember]
    latencies: list[int]

class PendingCall:
    """The foremost pending operation of a group, see ``cpp/engine/status_page.h``.

    Attributes:
        since: when it was submitted, in nanoseconds of CLOCK_MONOTONIC.
        waits: it waits for the rank ``blocker`` to call it, not for its data.
    """

    text: str
    number: int
    since: int
    blocker: int
    waits: bool

class GroupStatus:
    """A group of a rank, see ``cpp/engine/status_page.h``."""

    name: str
    ident: int
    rank: int
    size: int
    pending: int
    statistics: Statistics
    call: PendingCall | None

class RemoteRank:
    """The last report of a rank on another host, see ``cpp/engine/status_page.h``.

    Attributes:
        alive: False if it has left or is lost.
        received: when the report came, in nanoseconds of this host's CLOCK_MONOTONIC.
        world: tells the worlds of its process apart.
        kind, number, age, waits: of its foremost pending operation; ``age`` in nanoseconds at the report, -1:
            none.
    """

    rank: int
    alive: bool
    received: int
    pid: int
    world: int
    completed: int
    bytes: int
    waited: int
    memory: int
    kind: str
    number: int
    age: int
    blocker: int
    waits: bool

class RankStatus:
    """The status page of a rank, see ``cpp/engine/status_page.h``.

    Attributes:
        worlds: number of worlds that its process has opened so far.
    """

    job: str
    pid: int
    leader: int
    rank: int
    size: int
    started: int
    written: int
    memory: int
    closed: bool
    worlds: int
    ended: Statistics
    groups: list[GroupStatus]
    remote: list[RemoteRank]

def read_status(fd: int) -> RankStatus | None: ...

# -- cpp/python/mpi.cc ------------------------------------------------------------------------------

class MpiLibrary:
    """The functions of an MPI library.  Handles are their bits as integers."""

    @staticmethod
    def make(
        functions: dict[str, int],
        handle_bytes: int,
        in_place: int,
        any_source: int,
        any_tag: int,
        comm_self: int,
    ) -> MpiLibrary:
        """``functions``: the addresses by name."""

    @staticmethod
    def names() -> tuple[list[str], list[str]]:
        """Names of functions that may have a variant with the suffix _c, and of other functions."""

def move_by_mpi(
    group: Group,
    library: MpiLibrary,
    comms: list[int],
    types: dict[int, int],
    reductions: dict[tuple[int, int], tuple[int, int, bool]],
    exchanges: bool,
) -> None:
    """Let MPI move the data of a group.

    Args:
        comms: a communicator for each lane.
        types: datatypes by the bytes of an element.
        reductions: datatype, operation, and whether the core divides by the number of ranks, by the codes of
            dtype and reduction; the core computes all others.
        exchanges: whether members pass parts by single messages, and not by collectives of MPI; the same on
            all members.
    """

# -- cpp/python/packed.cc ---------------------------------------------------------------------------

def pack(value: object, prefix: bytes) -> bytes | None:
    """``prefix`` and the packed form of ``value``; None: it has one only as a pickle."""

def unpack(packed: bytes | memoryview, start: int) -> Any:
    """The value that :func:`pack` packed, which begins at ``start``.  Raises ValueError for anything else."""

# -- cpp/rpc ------------------------------------------------------------------------------------

class Part:
    """One received buffer: writable, owned by whoever holds this object, alive as long as a view of it.

    Supports the buffer protocol (``memoryview(part)``, ``torch.frombuffer(part, dtype=...)``,
    ``pickle.loads(head, buffers=parts)``); ``len(part)`` is its size in bytes, which may be 0.  Its memory
    begins at a multiple of 16.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Packet:
    """A received packet: a call, a post (one way), or the reply to a call.  Any thread may use it."""

    @property
    def peer(self) -> int:
        """The peer that sent it, as :meth:`RpcEndpoint.attach` named it."""

    @property
    def call(self) -> int:
        """The sender's number of the call, 1 or more; 0 for a post."""

    @property
    def mailbox(self) -> int: ...
    @property
    def flags(self) -> int:
        """The 16 bits that the sender gave, for the codec to use."""

    @property
    def failed(self) -> bool:
        """For a reply: whether its sender gave ``failed=True``."""

    @property
    def head(self) -> bytes: ...
    @property
    def parts(self) -> list[Part]: ...
    def remaining(self) -> float | None:
        """Seconds until the caller gives up, 0.0 when it has; None if it waits for ever, or for a post."""

    def cancelled(self) -> bool:
        """Whether nobody wants the reply any more: the caller cancelled or timed out, or is lost."""

    def announce(self, ticket: int) -> bool:
        """Ask for the ticket among the completions once when :meth:`cancelled` becomes true.

        True if it is so already; the ticket then never appears.  It does not appear either once the packet
        was replied to.
        """

    def describe(self, text: str) -> None:
        """Say what runs for this call, for the error of a caller whose time is over; at most 200 bytes."""

class CallEnd(enum.Enum):
    """Why a call has no reply."""

    TIMEOUT = ...  # the deadline passed
    CANCELLED = ...  # by Call.cancel
    LOST = ...  # the peer ended, or was dropped
    CLOSED = ...  # the endpoint was closed
    REFUSED = ...  # the mailbox is closed at the callee, or one of the two has no memory for the packet
    UNSENT = ...  # by RpcEndpoint.give_up

class CallFailure:
    """Why a call has no reply."""

    end: CallEnd
    text: str

class Call:
    """A request on its way.  Any thread may use it; letting go of it does not cancel the call.

    A call ends exactly once: with a reply, or with an error (see :meth:`error`).
    """

    @property
    def peer(self) -> int: ...
    @property
    def reads(self) -> bool:
        """Whether the memory of the parts may still be read: some of it is neither sent nor lent."""
    @property
    def number(self) -> int: ...
    def announce_failure(self, ticket: int, flags: int = 0) -> bool:
        """Let ``ticket`` appear among the completions if the call ends with an error or a failed reply.

        Also if its reply has one of these ``flags``.

        True if it has ended already, well or not; the ticket then never appears.
        """

    def done(self) -> bool:
        """Whether the call has ended; does not block."""

    def wait(self, timeout: float | None) -> bool:
        """Block without the GIL until the call has ended, at most ``timeout`` seconds; whether it has.

        Signal handlers run meanwhile if this is the main thread, and what they raise is raised here; the
        call goes on.  None waits as long as the call lasts.
        """

    def error(self) -> CallFailure | None:
        """The failure of the call; None while it is pending, or if it has a reply.  Does not block.

        The text of a timeout is what the callee's endpoint knew of the call, if it has answered ("never
        received", "queued behind 3", "running for 3.2 s in fn"), else what is known here ("takes nothing for
        5 s, 812 packets queued").
        """

    def reply(self) -> Packet:
        """The reply; its memory is the caller's from now on.

        Raises:
            RuntimeError: the call is pending, has failed, or its reply was taken already.
        """

    def announce(self, ticket: int) -> bool:
        """Ask for the ticket among the completions once when the call has ended.

        True if it has ended already; the ticket then never appears.  Only the last ticket counts.
        """

    def cancel(self) -> bool:
        """End the call now with ``CANCELLED`` and tell the callee; False if it had ended.  Does not block.

        A callee that has not begun drops the packet; else :meth:`Packet.cancelled` is true there.
        """

class Room:
    """Room among what is on its way to a peer, given back when this is let go."""

class RpcEndpoint:
    """The native endpoint of one agent: a thread of its own carries packets to and from any number of peers.

    Every method may be called by any thread at any time, also after :meth:`close`: what sends then fails with
    ConnectionError.  The thread never runs Python.  In a forked child every method raises RuntimeError, but
    :meth:`close`, which does nothing; the child's copies of all descriptors are closed by the fork itself.

    Packets from one peer to one mailbox other than 0 are taken in the order in which they were sent; those to
    mailbox 0 as they become complete.
    """

    @staticmethod
    def make(budget: int, heartbeat: float) -> RpcEndpoint:
        """An endpoint without peers.

        Args:
            budget: bytes of large parts (over 256 KiB) that may be received and not yet taken, for all peers
                together; one at a time per peer is received in any case.
            heartbeat: seconds of silence after which a peer without a pid counts as lost.
        """

    @property
    def lends(self) -> bool:
        """Whether there is memory that parts over 256 KiB are lent from."""

    def memory(self) -> int:
        """A new descriptor, the caller's, of the memory that parts are lent from; -1: there is none.

        Raises:
            OSError: no descriptor is left.
        """

    def buffer(self, bytes: int) -> Part:
        """Memory with any contents, which later buffers and received parts use again.

        Raises:
            MemoryError: there is no memory.
        """

    def attach(self, fd: int, pid: int, ticket: int, memory: int = -1) -> int:
        """Add a peer; its name here, an integer that is never used again.

        Args:
            fd: a connected, authenticated stream socket (TCP or unix) with nothing of the handshake left
                unread.  The endpoint takes the descriptor, also if it raises.
            pid: of a peer on this host whose death is watched, else 0.
            ticket: appears among the completions once when the peer is lost, leaves or is dropped, after
                everything that it had sent can be taken and its pending calls have ended.
            memory: a descriptor of the peer's :meth:`memory`, which the endpoint takes over too, where both
                ends have exchanged them: large parts are then lent in both directions; -1: none are.

        Raises:
            ConnectionError: the endpoint is closed, or the memory is no memfd whose size is sealed.
            OSError: no descriptor is left.
        """

    def drop(self, peer: int, why: str) -> None:
        """Cut the connection to a peer at once; its pending calls fail with ``LOST`` and ``why``.

        What it had sent completely can still be taken.  Nothing happens if it is lost or unknown.
        """

    def lost(self, peer: int) -> str | None:
        """Why a peer is lost; None while it is there.  The last 4,096 losses are remembered, then ""."""

    def request(
        self,
        peer: int,
        mailbox: int,
        head: bytes,
        parts: Sequence[tuple[int, int]],
        keep: object,
        timeout: float | None,
        flags: int = 0,
        shown: str = "",
    ) -> Call:
        """Send a call.

        Blocks, without the GIL, only while the peer takes nothing and 64 MiB of packets are queued for it;
        then until there is room, at most until the call's own timeout.

        Args:
            parts: (address, bytes) of each, at most 65,535.  Those up to 16 KiB are copied before this
                returns; larger ones are read until the call has ended.
            keep: kept alive as long as the memory of the parts is read.  It is let go in a thread that calls
                a method of this endpoint, with the GIL.
            timeout: seconds from now until the call fails with ``TIMEOUT``; None: never.
            shown: the call, as :meth:`pending` shows it.

        A peer that is lost, or that never was, gives a call that has failed with ``LOST``.
        """

    def post(
        self,
        peer: int,
        mailbox: int,
        head: bytes,
        parts: Sequence[tuple[int, int]],
        keep: object,
        timeout: float | None,
        flags: int = 0,
    ) -> bool:
        """Send a packet that nobody replies to; arguments and blocking as :meth:`request`.

        Whether it was sent or queued: False if the peer is lost, or took nothing until ``timeout``.
        """

    def hold(
        self,
        peer: int,
        mailbox: int,
        bytes: int,
        timeout: float | None,
        one_way: bool = False,
        shown: str = "",
    ) -> tuple[Call, Room | None]:
        """Take the place of a call, or of a post, whose contents come later, by :meth:`fill`.

        Later packets to the same mailbox wait behind it, unless that is mailbox 0; others pass.  The call may
        fail meanwhile as every call can.  Blocks as :meth:`request` does, until there is room for ``bytes``.

        Returns:
            The call; one that stands for a post never ends by itself.  And the room that ``bytes`` take up
            until it is let go; None if there was none before ``timeout``.
        """

    def fill(
        self,
        held: Call,
        mailbox: int,
        head: bytes,
        parts: Sequence[tuple[int, int]],
        keep: object,
        one_way: bool = False,
        flags: int = 0,
    ) -> bool:
        """Send what is held; arguments as of :meth:`request`.  False if the call has ended."""

    def give_up(self, held: Call, why: str) -> None:
        """Fail a call that is held with ``UNSENT``: its contents will never come."""

    def reply(
        self,
        packet: Packet,
        head: bytes,
        parts: Sequence[tuple[int, int]],
        keep: object,
        failed: bool = False,
        flags: int = 0,
    ) -> bool:
        """Answer a call, once.  Never blocks: large parts are queued.

        Whether it was sent or queued: False if nobody wants it any more, the packet was replied to already or
        is a post.
        """

    def take(self, mailbox: int, timeout: float | None, most: int) -> list[Packet] | None:
        """The next packets of a mailbox, at most ``most``; [] if none came in ``timeout`` seconds.

        None once the endpoint or the mailbox is closed.  Blocks without the GIL; signals as in
        :meth:`Call.wait`.
        Cancelled and overdue calls are never among the packets.  Several threads may take from one mailbox
        (of those blocked the last to come is served first); a mailbox whose packets are ordered wants one.
        """

    def waiting(self, mailbox: int) -> int:
        """How many packets of a mailbox wait to be taken."""

    def open(self, mailbox: int) -> None:
        """Let packets come to a mailbox.  Mailbox 0 is always open."""

    def release(self, mailbox: int) -> None:
        """Close a mailbox other than 0: :meth:`take` of it returns None, its packets are dropped.

        Calls to it that come later fail with ``REFUSED``; those that it held are not answered.
        """

    def watch(self, ticket: int, patience: float) -> None:
        """From now on the ticket appears among the completions each time a packet of mailbox 0 has waited
        ``patience`` seconds while no thread was blocked in :meth:`take`; at most once in that time.
        """

    def announce(self, ticket: int) -> None:
        """Put a ticket among the completions."""

    def completions(self, timeout: float | None) -> list[int] | None:
        """The tickets that have become due, in order; [] if none did in ``timeout`` seconds.

        None once the endpoint is closed and all tickets were given.  Blocks without the GIL; one thread calls
        it.
        """

    def stats(self) -> dict[str, int]:
        """What is held: peers, calls, packets not taken, calls handled, bytes queued, granted, lent, kept.

        And ``made``: how many calls were ever made to the peers that are there.
        """

    def pending(self) -> list[tuple[int, int, str, float]]:
        """The calls without a reply: peer, number on its connection, ``shown``, and seconds since then."""

    def handled(self) -> list[tuple[int, int, str, float | None]]:
        """The calls that others made and that have no reply yet.

        Peer, number on its connection, what :meth:`Packet.describe` said, and seconds since it was taken;
        None: it waits for a thread, or has not come as a whole.
        """

    def disconnect(self, peer: int) -> None:
        """Cut the connection as a cable would be, for tests."""

    def pause_heartbeats(self, silent: bool) -> None:
        """Stop sending heartbeats, for tests."""

    def close(self, timeout: float) -> list[int]:
        """Send what is queued, say bye to all peers and end; at most ``timeout`` seconds.

        Returns:
            the peers that did not take all of it in time.

        Pending calls fail with ``CLOSED`` at once, blocked threads return.  Afterwards no thread and no
        descriptor is left, but that of the arena, which goes with this object.  Blocks without the GIL.
        A second call does nothing.
        """

# -- cpp/python/constant_override.cc ----------------------------------------------------------------

def constant_override(value: Any, on_error: Callable[[BaseException], object]) -> Callable[[], Any]:
    """A method for pybind11 to call where no exception may be raised, also while one is set.

    It returns `value`, and first calls `on_error` with an exception that is set, which is cleared.
    """

# -- cpp/python/exit_code.cc -------------------------------------------------------------------------

def exit_with(code: int) -> None:
    """The process ends with this code, from 1 to 255, should it end in good order."""

# -- cpp/python/interrupt.cc ----------------------------------------------------------------------

def guard_interrupts(
    handler: Callable[[int, FrameType | None], Any], marks: dict[CodeType, bool]
) -> Callable[[int, FrameType | None], Any]:
    """A handler of SIGINT that calls this one where an exception may be raised, and else a moment later.

    Args:
        marks: by the code of functions whether the signal waits for their end; of several that run, the
            innermost one decides.
    """

def guarded_handler(handler: object) -> Callable[[int, FrameType | None], Any] | None:
    """The handler that such a one calls; None: it is none."""

# -- cpp/kernels --------------------------------------------------------------------------------

class kernels:
    class RedOp(enum.Enum):
        """A reduction; the names and values are those of :class:`shoal.spec.ReduceOp`."""

        SUM = ...

    class Reduction:
        def __init__(self, dtype: int, op: int, divisor: int = 1) -> None: ...

    @staticmethod
    def reduce(
        reduction: Reduction, dsts: Sequence[int], srcs: Sequence[int], count: int, stream: bool = False
    ) -> None: ...
    @staticmethod
    def copy(dst: int, src: int, bytes: int, stream: bool = False) -> None: ...
