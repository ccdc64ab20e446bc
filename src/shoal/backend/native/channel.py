"""The native backend: shared memory within a host, authenticated TCP between hosts.

Python connects the ranks (:mod:`shoal.backend.native.mesh`) and passes addresses of memory to the core, which
moves the bytes; see ``cpp/`` and ``docs/design.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from ... import _core, config, failure_report
from ...common.formatting import counted, encodable
from ...errors import (
    CollectiveMismatch,
    ForkedProcess,
    GroupClosed,
    GroupError,
    OutOfResources,
    PeerLost,
    UnsupportedOperation,
    UsageError,
    WireError,
)
from ...future import Future, callback_scope
from ...recorder import FlightRecorder
from ...spec import DTYPE_CODES, DTYPES_BY_CODE, MAX_TAG, REDUCTIONS, FailureScope, Operation, OpKind
from ...statistics import GroupStatistics, group_statistics
from ...tracing.recording import ContextTrace
from ..agreement import AgreementOp, AgreementOutcome, AgreementState, PendingAgreement, WitnessRequest
from ..base import Backend, DataChannel, GroupSpec, Membership, Shortcut
from .errors import exception_of, explain_resource_errors
from .mesh import OfferedMemory, connect
from .options import (
    checked_heartbeat,
    checked_progress_threads,
    checked_shared_memory_limit,
    checked_transport,
    memory_size,
)

T = TypeVar("T")

_SINGLE_COUNT_KINDS = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST)
#: Tensors of operations that failed while a library used their memory; kept until the process ends.
_abandoned: list[object] = []
_DISPATCH_POLL_INTERVAL_S = 1.0  # seconds between checks whether the backend is still open


def _check_codes() -> None:
    """Refuse a core that numbers operations or reductions differently than :mod:`shoal.spec`.

    Raises:
        ImportError: ``shoal._core`` was built from other sources than these.
    """
    codes = [(kind.name, kind.value, _core.Kind[kind.name].value) for kind in OpKind]
    codes += [(op.name, op.code, _core.kernels.RedOp[op.name].value) for op in REDUCTIONS]
    for name, expected, code in codes:
        if code != expected:
            raise ImportError(
                f"shoal._core has the code {code} for {name}, expected {expected}: it was built from other "
                "sources; install shoal again"
            )


_core.learn_tensors(torch.Tensor)
_check_codes()
_core.learn_calls(callback_scope, tuple(DTYPES_BY_CODE[code] for code in range(len(DTYPES_BY_CODE))), MAX_TAG)


class _CoreFuture(Future[T]):
    """A future whose common ``wait()`` is a single C call (``cpp/python/source.cc``)."""

    __slots__ = ()


_core.learn_futures(_CoreFuture, Future.wait)


def exit_with(code: int) -> None:
    """Make the process exit with ``code``, 1 to 255, if it ends regularly."""
    _core.exit_with(code)


class NativeBackend(Backend):
    """Connects a process to all ranks of its job.

    Args:
        membership: the rank of this process and the other ranks of its job.
        timeout: seconds within which all ranks must be connected.
        transport: ``"auto"`` uses shared memory where possible, ``"shm"`` requires it, ``"tcp"`` never uses
            it; None: ``SHOAL_TRANSPORT``.
        heartbeat_timeout: seconds without a heartbeat after which a remote rank is lost; None:
            ``SHOAL_HEARTBEAT_TIMEOUT``.
        shared_memory_limit: maximum shared memory of this process, in bytes; None:
            ``SHOAL_SHARED_MEMORY_LIMIT``, or the machine's memory if unset.
        progress_threads: number of threads that run operations for which no thread waits; None:
            ``SHOAL_PROGRESS_THREADS`` (1).
    """

    name = "native"
    scopes = frozenset(FailureScope)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        checked_transport(options.get("transport"))
        checked_heartbeat(options.get("heartbeat_timeout"))
        checked_shared_memory_limit(options.get("shared_memory_limit"))
        checked_progress_threads(options.get("progress_threads"))

    def __init__(
        self,
        membership: Membership,
        *,
        timeout: float,
        transport: str | None = None,
        heartbeat_timeout: float | None = None,
        shared_memory_limit: int | None = None,
        progress_threads: int | None = None,
    ) -> None:
        self._membership = membership
        way = checked_transport(transport)
        heartbeat = checked_heartbeat(heartbeat_timeout)
        capacity, limit = memory_size(membership.local_size, shared_memory_limit)
        threads = checked_progress_threads(progress_threads)
        self._hosts = [0]
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._callback_ids = itertools.count(1)
        # Re-entrant: the garbage collector may free a future in a critical section of the same thread.
        self._lock = threading.RLock()
        self._dispatcher: threading.Thread | None = None
        self._stopped = False
        self._lost: frozenset[int] = frozenset()
        self._context: Any = _CLOSED
        self.trace: ContextTrace | None = None
        ranks = counted(membership.local_size, "rank")
        room = f"reserving {capacity >> 20} MiB of address space for each of {ranks}"
        with explain_resource_errors(f"rank {membership.rank} cannot start ({room})"):
            try:
                self._context = _core.Context.make(
                    membership.rank, membership.size, membership.local_size, capacity, limit, heartbeat,
                    membership.waits_for_stopped, encodable(membership.job_name),
                    membership.status_page, list(membership.ranks), threads,
                )  # fmt: skip
                self.trace = ContextTrace(self._context, membership)
                if membership.size > 1:
                    self._connect(way, timeout)
                self._context.start()
            except BaseException:
                # Now, and not only when the last frame of the traceback is freed.
                self._context.close(0.0)
                self._close_trace()
                self._context = _CLOSED
                raise

    def _connect(self, transport: str, timeout: float) -> None:
        me = self._membership
        rings = [0 if rank == me.rank else self._context.make_ring() for rank in range(me.size)]
        memory = OfferedMemory(self._context.memory_fd, self._context.memory_capacity, rings)
        mesh = connect(me, memory, transport=transport, timeout=timeout)
        self._hosts = mesh.hosts
        with mesh:  # closes the descriptors that the core does not take over
            for rank in list(mesh.local):
                peer = mesh.local[rank]
                try:
                    self._context.add_local(
                        rank, peer.socket, peer.memory_fd, peer.capacity, peer.out, peer.in_, peer.pid
                    )
                except ConnectionError as error:
                    raise WireError(f"rank {rank} shares memory that cannot be used: {error}") from None
                del mesh.local[rank]
                os.close(peer.memory_fd)
            for rank in list(mesh.remote):
                self._context.add_remote(rank, mesh.remote.pop(rank))

    def channel(self, group: GroupSpec) -> NativeChannel:
        return NativeChannel(self, self._core_group(group), group)

    def _core_group(self, group: GroupSpec, *, moved: bool = False) -> _core.Group:
        """Make the group in the core; ``moved``: a mover moves the data of its numbered collectives."""
        with explain_resource_errors(f"rank {self._membership.rank} cannot make the group {group.name!r}"):
            core: _core.Group = self._context.group(
                group.ident,
                encodable(group.name),
                group.rank,
                list(group.ranks),
                self.hosts(group.ranks),
                group.tuning.concurrency,
                group.scope == FailureScope.PAIR,
                config.VOTE_TIMEOUT.get(),
                config.QUORUM.get() == "any",
                moved,
                config.ALGORITHMS.index(group.tuning.algorithm),
            )
        if self.trace is not None:
            self.trace.add_group(
                group.ident,
                encodable(group.name),
                group.ranks,
                group.tuning.concurrency,
                internal=group.internal,
            )
        return core

    def hosts(self, ranks: Sequence[int]) -> list[int]:
        return [self._hosts[rank] for rank in ranks]

    def report_notified(self, ranks: Iterable[int]) -> None:
        """Report to the launcher that this rank was notified that some connected ranks failed or left."""
        known = self._membership.ranks
        in_world = [known[rank] for rank in ranks] if known else list(ranks)
        failure_report.notified(in_world, self._membership.meeting)

    def lost(self) -> frozenset[int]:
        if self._context is not _CLOSED:
            self._lost = frozenset(self._context.lost())
        return self._lost

    def totals(self) -> GroupStatistics | None:
        return None if self._context is _CLOSED else group_statistics(self._context.totals(), 0)

    def status_page(self) -> _core.Context | None:
        return None if self._context is _CLOSED else self._context

    def close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._context.close(timeout)
        self._close_trace()
        with self._lock:
            self._stopped = True
            dispatcher = self._dispatcher
        # The dispatcher itself may call close(), in a finalizer; and its callbacks may outlast the timeout.
        if dispatcher is not None and dispatcher is not threading.current_thread():
            dispatcher.join(max(deadline - time.monotonic(), 0.1))
        # A reference to the group must not keep the shared memory of all ranks of this host mapped.
        self._context = _CLOSED

    def _close_trace(self) -> None:
        """End the trace; a reference to it would keep the context."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.close()

    def program_ends(self) -> None:
        self._context.program_ends()

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()  # it may have been held by a thread that the child does not have
        self._context.disown()

    def notify(self, core: _core.Operation, fn: Callable[[], None]) -> None:
        """Call ``fn`` in the dispatcher thread when ``core`` is done, or here and now if it is.

        Raises:
            OutOfResources: the dispatcher thread cannot be started; ``fn`` stays registered until one can.
        """
        callback_id = next(self._callback_ids)
        thread_error = None
        with self._lock:
            self._callbacks[callback_id] = fn
            if self._dispatcher is None and not self._stopped:
                dispatcher = threading.Thread(
                    target=self._dispatch, name=f"shoal-dispatch-{self._membership.rank}", daemon=True
                )
                try:
                    dispatcher.start()
                    self._dispatcher = dispatcher
                except RuntimeError as error:
                    thread_error = error
        if core.announce(callback_id):
            with self._lock:
                del self._callbacks[callback_id]
            fn()
        elif thread_error is not None:
            raise OutOfResources(
                f"rank {self._membership.rank} cannot tell when an operation is complete: {thread_error}.  "
                "Raise the number of threads that the process may have (ulimit -u)"
            ) from thread_error

    def _dispatch(self) -> None:
        context = self._context
        while True:
            callback_ids = context.completions(_DISPATCH_POLL_INTERVAL_S)
            for callback_id in callback_ids:
                with self._lock:
                    fn = self._callbacks.pop(callback_id)
                fn()
                del fn  # free the objects that it references before the next wait
            # In a closed context every operation is complete, so new announcements return at once.
            if not callback_ids and self._stopped:
                return

    # -- fault injection, for shoal.testing ----------------------------------------------------

    def disconnect(self, rank: int) -> None:
        """Break the connection to a rank, as a broken cable would."""
        self._context.disconnect(rank)

    def held(self) -> tuple[int, int, int, int]:
        """Return the numbers of remembered groups, unread messages, frames for groups that do not exist yet,
        and bytes of the peers' windows in use.  For tests.
        """
        held: tuple[int, int, int, int] = self._context.held()
        return held

    def pause_heartbeats(self, silent: bool = True) -> None:
        """Stop sending heartbeats, or resume with ``silent=False``."""
        self._context.pause_heartbeats(silent)

    def die_at(self, point: str) -> None:
        """Kill this process when an operation reaches ``point``; see :func:`shoal.testing.faults.die_at`."""
        self._context.die_at(_core.Fault[point.upper().replace(" ", "_")])


class NativeChannel(DataChannel):
    """The data channel of one group of the native backend."""

    def __init__(self, backend: NativeBackend, core: _core.Group, spec: GroupSpec) -> None:
        self._backend = backend
        self._core = core
        self._spec = spec
        self._shortcut: _core.Shortcut | None = None
        self._failure: GroupError | None = None
        self._statistics = group_statistics(core.statistics(), 0)
        self.reported = False

    def submit(self, operation: Operation) -> Future[Any]:
        kind = operation.kind
        if kind is OpKind.SEND or kind is OpKind.RECV:
            return self._message(operation)
        return self._collective(operation)

    def check(self, operation: Operation) -> None:
        if operation.kind is OpKind.SEND or operation.kind is OpKind.RECV:
            for x in (*operation.inputs, *operation.outputs):
                pack_shape(x.shape)
        elif self._spec.scope == FailureScope.PAIR:
            raise UnsupportedOperation(
                f"{operation.kind.name.lower()} on rank {self._spec.rank}: group {self._spec.name!r} has "
                "scope='pair', and carries messages only; collectives need a group with scope='all'"
            )

    def shortcut(self, lock: threading.Lock, recorder: FlightRecorder | None) -> Shortcut:
        append = None if recorder is None else recorder.append
        self._shortcut = _core.Shortcut(self._core, self, lock, self._spec.ident, append)
        return self._shortcut

    def _collective(self, operation: Operation) -> Future[Any]:
        return self._future_of(self._submit_collective(operation), operation)

    def _submit_collective(self, operation: Operation) -> _core.Operation:
        inputs, outputs = operation.inputs, operation.outputs
        tensors = inputs or outputs
        count, sizes = _counts(operation)
        return self._core.collective(
            operation.kind,
            _parts(inputs),
            _parts(outputs),
            count,
            DTYPE_CODES[tensors[0].dtype] if tensors else 0,
            operation.op.code,
            operation.root,
            sizes,
            operation.number,
            operation.key,
            operation.timeout,
        )

    def _future_of(self, core: _core.Operation, operation: Operation) -> Future[Any]:
        source = _core.Source(self, core, (operation.inputs, operation.outputs))
        return _CoreFuture(source, value=operation.result)

    def external(self, operation: Operation) -> _core.Operation:
        """Submit a collective whose data another engine moves.

        The members meet and compare their calls.  The returned operation is complete after that and after its
        ``finish_external()``.
        """
        tensors = operation.inputs or operation.outputs
        count, sizes = _counts(operation)
        return self._core.external(
            operation.kind, count, DTYPE_CODES[tensors[0].dtype] if tensors else 0, operation.op.code,
            operation.root, sizes, operation.number, operation.key, operation.timeout,
            bool(tensors) and not tensors[0].is_cpu,
        )  # fmt: skip

    def _message(self, operation: Operation) -> Future[Any]:
        tensors = operation.inputs or operation.outputs
        dims: list[int] = []
        dtype = 0
        if tensors:
            x = tensors[0]
            dtype = DTYPE_CODES[x.dtype]
            dims = pack_shape(x.shape)
        core = self._core.message(
            operation.kind, _parts(tensors), operation.peer, operation.tag, dtype, dims, operation.timeout
        )
        source = _core.Source(self, core, tensors)
        if operation.kind is OpKind.SEND:
            return _CoreFuture(source)
        return _CoreFuture(source, finish=lambda: _received(core, operation.outputs))

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with explain_resource_errors(f"empty on rank {self._spec.rank} of group {self._spec.name!r}"):
            return from_dlpack(self._core.allocate(nbytes))

    def failure(self) -> GroupError | None:
        known = self._failure
        if known is None and not self._core.broken():
            return None
        if known is None or isinstance(known, PeerLost):
            latest = self.error(self._core.failure())  # more ranks may have been lost since
            assert not isinstance(latest, ForkedProcess)  # a fork only fails operations
            if known is None or str(latest) != str(known):
                self._failure = latest
        return self._failure

    def error(self, error: _core.Error | None) -> GroupError | ForkedProcess | None:
        """Return the exception for an error of the core; report to the launcher if another rank caused it."""
        if error is not None and error.caused_by_others(self._spec.rank):
            self._backend.report_notified(self._spec.ranks[rank] for rank in error.ranks)
        return exception_of(error, self._spec.rank, self._spec.name)

    def report(self, failure: GroupError) -> None:
        self.reported = True
        if isinstance(failure, PeerLost):
            self._backend.losses_reported = True

    def last_completed(self) -> int:
        number: int = self._core.last_completed()
        return number

    def statistics(self) -> GroupStatistics:
        if self._core is not _CLOSED:
            self._statistics = group_statistics(self._core.statistics(), self._core.pending())
        return self._statistics

    def fence(self, ranks: Sequence[int], timeout: float) -> list[int]:
        left: list[int] = self._core.fence(list(ranks), timeout)
        return left

    def vote_limit(self) -> int:
        limit: int = self._core.vote_limit()
        return limit

    def agree(self, op: AgreementOp, value: bytes, timeout: float) -> PendingAgreement:
        return NativeAgreement(self._core, self._spec, op, value, timeout)

    def abort(self, reason: str) -> None:
        self._core.abort(encodable(reason))

    def begin_close(self) -> None:
        self._core.begin_close()

    def close(self, timeout: float) -> None:
        self._core.close(timeout)
        self.statistics()  # keeps them
        failure = exception_of(self._core.failure(), self._spec.rank, self._spec.name)
        self._core = _CLOSED
        if (trace := self._backend.trace) is not None:
            trace.discard_group(self._spec.ident)
        if self._shortcut is not None:
            self._shortcut.detach()
        self._failure = None  # its traceback references the frames of a caller
        if isinstance(failure, CollectiveMismatch) and not self.reported:
            raise CollectiveMismatch(
                f"group {self._spec.name!r} on rank {self._spec.rank} failed while it was closed: {failure}"
            )

    # -- called by the sources of futures, in cpp/python/source.cc -------------------------------

    def error_of(self, core: _core.Operation) -> GroupError | ForkedProcess | None:
        """Return the error of a complete operation, or None."""
        error = core.error()
        raised = self.error(error)
        if isinstance(raised, GroupError) and self._core.broken():
            self.report(raised)
            if self.on_failure is not None:
                self.on_failure()
        return raised

    def notify(self, core: _core.Operation, source: _core.Source, fn: Callable[[], None]) -> None:
        """Release the tensors and call ``fn`` when ``core`` is done; see :meth:`NativeBackend.notify`."""

        def done() -> None:
            source.done()
            fn()

        self._backend.notify(core, done)

    def keep(self, core: _core.Operation, tensors: object) -> None:
        """Keep the tensors alive until an operation whose future was dropped is complete."""
        with contextlib.suppress(OutOfResources):  # the backend keeps them nevertheless
            self._backend.notify(core, partial(_release, core, tensors))


class NativeAgreement:
    """One agreement of ``core``, a group of the core; raises GroupError if too many are pending."""

    def __init__(
        self, core: _core.Group, spec: GroupSpec, op: AgreementOp, value: bytes, timeout: float
    ) -> None:
        number = core.agree(_core.AgreementOp[op.name], value, timeout)
        if number is None:
            raise GroupError(
                f"agree on rank {spec.rank} of group {spec.name!r}: 64 agreements are under way; wait for "
                "the first of them"
            )
        self._core = core
        self.number = number

    def wait(self, timeout: float) -> AgreementState:
        news = self._core.agreed(self.number, timeout)
        return AgreementState(
            AgreementOutcome[news.outcome.name],
            None if news.op is None else AgreementOp[news.op.name],
            news.value,
            tuple(AgreementOp[op.name] for op in news.called),
            tuple(news.ranks),
            None if news.ballot is None else WitnessRequest(news.ballot, news.proposal),
        )

    def ask_witness(self, request: WitnessRequest, kept: bytes) -> bytes | None:
        wanted: bytes | None = self._core.ask_witness(*request, kept)
        return wanted

    def tell_witness(self, request: WitnessRequest, kept: bytes) -> None:
        self._core.tell_witness(self.number, *request, kept)

    def losses(self) -> tuple[list[int], list[int]]:
        losses: tuple[list[int], list[int]] = self._core.losses()
        return losses


class _Closed:
    """Replaces a closed core object: cleanup methods do nothing, all others raise GroupClosed."""

    def broken(self) -> bool:
        return False

    def ignore(self, *args: object) -> None:
        pass

    failure = abort = begin_close = close = program_ends = disown = ignore

    def __getattr__(self, name: str) -> Any:
        raise GroupClosed(f"the group was closed while {name}() was on its way; make a new group to go on")


_CLOSED: Any = _Closed()


def _release(core: _core.Operation, tensors: object) -> None:
    """Let the caller drop its reference to the tensors, unless a library may still use their memory."""
    if core.abandoned():
        _abandoned.append(tensors)


def _parts(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(x.data_ptr(), x.nbytes) for x in tensors]


def _counts(operation: Operation) -> tuple[int, list[int]]:
    """Return the sizes that must be equal on all ranks: one count of elements, or a list of sizes."""
    sizes = operation.sizes
    if sizes:
        if all(size == sizes[0] for size in sizes):
            return sizes[0], []
        return 0, list(sizes)
    if operation.kind in _SINGLE_COUNT_KINDS:
        return (operation.inputs or operation.outputs)[0].numel(), []
    return 0, []


def _received(core: _core.Operation, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int, int]:
    """Return the value of a receive: tensor, source, tag."""
    message = core.received()
    if outputs:
        return outputs[0], message.source, message.tag
    dtype = DTYPES_BY_CODE[message.dtype]
    dims = unpack_shape(message.dims)
    raw = from_dlpack(message.data)
    tensor = raw.view(dtype).view(dims) if raw.numel() else torch.empty(dims, dtype=dtype, device="cpu")
    return tensor, message.source, message.tag


# The encoding of shapes in the header of a message, which has eight 64-bit words for lengths.  A shape of
# more dimensions is packed into these words: the number of dimensions, then each length in base 128 (7 bits a
# byte, little-endian).  The highest bit of the last word marks a packed shape, since no length is that large.
# Received shapes were checked by cpp/net/check.cc.
_MAX_DIMS = 8


def pack_shape(shape: Sequence[int]) -> list[int]:
    """Return the words of a message's header for ``shape``; raise UsageError if the shape does not fit."""
    if len(shape) <= _MAX_DIMS:
        return list(shape)
    encoded = bytearray([len(shape)])
    for length in shape:
        while length > 0x7F:
            encoded.append(length & 0x7F | 0x80)
            length >>= 7
        encoded.append(length)
    if len(encoded) >= 8 * _MAX_DIMS:
        raise UsageError(f"a message cannot carry the shape {tuple(shape)}; send a view of fewer dimensions")
    encoded = encoded.ljust(8 * _MAX_DIMS - 1, b"\0") + b"\x80"
    return [int.from_bytes(encoded[i : i + 8], "little") for i in range(0, len(encoded), 8)]


def unpack_shape(dims: list[int]) -> list[int]:
    """Return the shape that the words ``dims`` of a header encode."""
    if len(dims) < _MAX_DIMS or not dims[-1] >> 63:
        return dims
    encoded = b"".join(word.to_bytes(8, "little") for word in dims)
    shape = [0] * encoded[0]
    place = 1
    for i in range(len(shape)):
        shift = 0
        while encoded[place] & 0x80:
            shape[i] |= (encoded[place] & 0x7F) << shift
            shift += 7
            place += 1
        shape[i] |= encoded[place] << shift
        place += 1
    return shape
