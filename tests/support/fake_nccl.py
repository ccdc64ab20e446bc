"""A test double of NCCL for fake streams and memory of the CPU, which refuses and reports misuse.

A kernel is work on a fake stream: it reads its inputs when the stream runs it, and waits there for the
kernels of its peers.  The ranks of a communicator are in one or several processes.  They connect to a hub, in
the process that called ``unique_id``, which matches their kernels and computes their outputs.  That process
must run until the communicator of each rank has ended.

Differences from NCCL:

* A collective ends on all ranks only after it has begun on all; a send ends only after its receive has begun.
* A group cannot mix collectives with sends and receives, and uses one stream for each communicator.
* After a rank was lost, no kernel of its communicator completes any more.

As in NCCL, each replay of a graph launches the kernels that it has captured, and a communicator ends only
when no graph has its kernels any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.backend.nccl.library import UNIQUE_ID_BYTES, Nccl, Reduction, Result
from shoal.errors import WireError
from shoal.net import Connection

from .fake_streams import FakeGraph, FakeRuntime, FakeStream
from .nccl_hub import TIMEOUT_S, TORCH_DTYPES, Hub, Signature, connect_to_hub, start_thread

#: values of ``ncclResult_t``: name and ``ncclGetErrorString``
RESULTS = {
    0: ("Success", "no error"),
    1: ("UnhandledCudaError", "unhandled cuda error"),
    2: ("SystemError", "unhandled system error"),
    3: ("InternalError", "internal error"),
    4: ("InvalidArgument", "invalid argument"),
    5: ("InvalidUsage", "invalid usage"),
    6: ("RemoteError", "remote process exited or there was a network error"),
    7: ("InProgress", "NCCL operation in progress"),
}
CUDA_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 1, 4, 5, 6

#: bytes of an element; 10 and 11 are the 8-bit floats
_SIZES = {number: dtype.itemsize for number, dtype in TORCH_DTYPES.items()} | {10: 1, 11: 1}


class FakeNcclError(Exception):
    """A result that is an error, with the message of nccl4py."""

    def __init__(self, status: int) -> None:
        name, text = RESULTS[status]
        super().__init__(f"{name} ({status}): {text}")
        self.status = status


@dataclass(frozen=True)
class _Call:
    """One call of a communication function; ``send`` and ``receive`` are addresses."""

    signature: Signature
    send: int = 0
    receive: int = 0

    def connections(self, rank: int) -> set[tuple[Any, ...]]:
        """The connections that it needs: those of a collective, or those from one rank to another."""
        function, peer = self.signature.function, self.signature.peer
        if not self.signature.point_to_point:
            return {(function,)}
        return (
            set() if peer == rank else {("send", rank, peer) if function == "send" else ("send", peer, rank)}
        )

    def memory(self, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Address and bytes of the input and of the output."""
        function, count, dtype, _, root = self.signature
        part = count * _SIZES[dtype]
        at_root = part if rank == root else 0
        read, written = {
            "reduce": (part, at_root), "broadcast": (at_root, part), "all_gather": (part, part * size),
            "reduce_scatter": (part * size, part), "send": (part, 0), "recv": (0, part),
        }.get(function, (part, part))  # fmt: skip
        return (self.send, read), (self.receive, written)

    def in_place(self, rank: int) -> bool:
        """Whether input and output are where NCCL allows them to overlap."""
        function, count, dtype, *_ = self.signature
        offset = rank * count * _SIZES[dtype]
        allowed = {"all_gather": offset, "reduce_scatter": -offset}.get(function, 0)
        return self.send - self.receive == allowed


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two pieces of memory (address, bytes) have a byte in common."""
    return 0 not in (a[1], b[1]) and a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


class FakeNccl(Nccl):
    """NCCL for the one device of a process; threads that are ranks have one instance each.

    Args:
        runtime: has the streams.
        connect_s: seconds that the first launch of a kind of function stays IN_PROGRESS after all ranks that
            take part have launched it.
        launch_s: seconds that each launch stays IN_PROGRESS, as with several ranks since NCCL 2.23.

    Attributes:
        violations: descriptions of the calls that NCCL forbids.
        init_failure: result with which communicators fail from now on; :meth:`init` raises InvalidArgument,
            others are the result of :meth:`async_error`, also InvalidUsage, as for ranks that share a GPU.
        version_code: result of :meth:`version`.
        max_ctas: those of the communicators that were made.
    """

    _handles = itertools.count(0x7F00_0000_0000, 0x1000)

    def __init__(self, runtime: FakeRuntime, *, connect_s: float = 0.003, launch_s: float = 30e-6) -> None:
        self.violations: list[str] = []
        self.init_failure: int | None = None
        self.version_code = 22809
        self.max_ctas: list[int | None] = []
        self._runtime = runtime
        self._connect_s = connect_s
        self._launch_s = launch_s
        self._comms: dict[int, _Communicator] = {}
        self._hubs: list[Hub] = []
        self._lock = threading.Lock()
        # The calls and groups that have not returned, of one thread.
        self._depth = 0
        self._thread = 0
        self._calls: list[tuple[_Communicator, FakeStream, _Call]] = []
        self._failed: Exception | None = None

    def fail(self, comm: int, result: int) -> None:
        """Make ``result`` the state of a communicator from now on."""
        self._comms[comm].fail(result)

    def close(self) -> None:
        """Abort the communicators that have not ended, and end the hubs of this instance."""
        while self._comms:
            comm = self._comms.popitem()[1]
            comm.end()
            comm.join()
        while self._hubs:
            self._hubs.pop().close()

    # -- the interface ---------------------------------------------------------------------------

    def version(self) -> int:
        return self.version_code

    def unique_id(self) -> bytes:
        hub = Hub()
        self._hubs.append(hub)
        return hub.unique_id

    def init(self, size: int, unique_id: bytes, rank: int, max_ctas: int | None = None) -> int:
        if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < size or max_ctas not in (None, *range(1, 65)):
            raise self._misuse(INVALID_ARGUMENT, f"init of rank {rank} of {size}, max_ctas {max_ctas}")
        if self.init_failure == INVALID_ARGUMENT:
            raise FakeNcclError(self.init_failure)
        comm = _Communicator(size, unique_id, rank)
        self.max_ctas.append(max_ctas)
        if self.init_failure is not None:
            comm.fail(self.init_failure)
        else:
            comm.start()
        handle = next(self._handles)
        self._comms[handle] = comm
        return handle

    def async_error(self, comm: int) -> int:
        return self._found(comm, "async_error").state()

    def last_error(self, comm: int) -> str:
        self._found(comm, "last_error")
        return self.violations[-1] if self.violations else ""

    def error_string(self, result: int) -> str:
        return RESULTS[result][1]

    def finalize(self, comm: int) -> None:
        self._usable(comm, "finalize").finalize()

    def destroy(self, comm: int) -> None:
        found = self._found(comm, "destroy")
        if not found.finalized:
            raise self._misuse(INVALID_USAGE, f"destroy of {found.name} before its finalize was complete")
        del self._comms[comm]
        found.end()

    def abort(self, comm: int) -> None:
        found = self._found(comm, "abort")
        del self._comms[comm]
        found.end()
        while found.graphs:
            time.sleep(0.001)

    def group_start(self) -> None:
        self._enter("group_start")

    def group_end(self) -> None:
        if not self._depth or self._thread != threading.get_ident():
            raise self._misuse(INVALID_USAGE, "group_end in a thread that has not called group_start")
        self._exit()

    def all_reduce(
        self, send: int, receive: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        self._call(_Call(Signature("all_reduce", count, dtype, op=op), send, receive), comm, stream)

    def reduce(
        self, send: int, receive: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int
    ) -> None:
        self._call(_Call(Signature("reduce", count, dtype, op=op, peer=root), send, receive), comm, stream)

    def broadcast(
        self, send: int, receive: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        self._call(_Call(Signature("broadcast", count, dtype, peer=root), send, receive), comm, stream)

    def all_gather(self, send: int, receive: int, count: int, dtype: int, comm: int, stream: int) -> None:
        self._call(_Call(Signature("all_gather", count, dtype), send, receive), comm, stream)

    def reduce_scatter(
        self, send: int, receive: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        self._call(_Call(Signature("reduce_scatter", count, dtype, op=op), send, receive), comm, stream)

    def send(self, send: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        self._call(_Call(Signature("send", count, dtype, peer=peer), send=send), comm, stream)

    def recv(self, receive: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        self._call(_Call(Signature("recv", count, dtype, peer=peer), receive=receive), comm, stream)

    # -- checks ----------------------------------------------------------------------------------

    def _misuse(self, status: int, what: str) -> FakeNcclError:
        """Record a violation; return the exception to raise."""
        self.violations.append(what)
        return FakeNcclError(status)

    def _found(self, comm: int, function: str) -> _Communicator:
        try:
            return self._comms[comm]
        except KeyError:
            what = f"{function} of a communicator that does not exist (any more)"
            raise self._misuse(INVALID_ARGUMENT, what) from None

    def _usable(self, comm: int, function: str) -> _Communicator:
        found = self._found(comm, function)
        state = found.state()
        if state == Result.IN_PROGRESS:
            raise self._misuse(INVALID_ARGUMENT, f"{function} of {found.name}, which is IN_PROGRESS")
        if state != Result.SUCCESS:
            raise FakeNcclError(state)
        if found.finalized:
            raise self._misuse(INVALID_USAGE, f"{function} of {found.name}, which is finalized")
        return found

    def _check(self, call: _Call, comm: _Communicator) -> None:
        """Check the arguments of a call."""
        function, count, dtype, op, peer = call.signature
        reduces = function in ("all_reduce", "reduce", "reduce_scatter")
        has_peer = call.signature.point_to_point or function in ("reduce", "broadcast")
        wrong = ""
        if count < 0:
            wrong = f"count {count}"
        elif dtype not in (TORCH_DTYPES if reduces else _SIZES):
            wrong = f"dtype {dtype}"
        elif reduces and op not in [*Reduction]:
            wrong = f"op {op}"
        elif has_peer and not 0 <= peer < comm.size:
            wrong = f"root or peer {peer} of {comm.size}"
        else:
            read, written = call.memory(comm.rank, comm.size)
            if any(count and not address for address, count in (read, written)):
                wrong = "no memory"
            elif _overlap(read, written) and not call.in_place(comm.rank):
                wrong = "an output that overlaps the input"
        if wrong:
            raise self._misuse(INVALID_ARGUMENT, f"{function} of {comm.name}: {wrong}")

    def _check_kernel(self, kernel: _Kernel) -> None:
        """Check calls of one group against each other."""
        comm, signatures = kernel.comm, [call.signature for call in kernel.calls]
        if len({signature.point_to_point for signature in signatures}) > 1:
            raise self._misuse(INVALID_USAGE, f"a group of {comm.name} mixes collectives and messages")
        to_self = [function for function, *_, peer in signatures if peer == comm.rank]
        if to_self.count("send") != to_self.count("recv"):
            raise self._misuse(INVALID_USAGE, f"a message of {comm.name} to its rank without its counterpart")
        memory = [call.memory(comm.rank, comm.size) for call in kernel.calls]
        for (_, written), other in itertools.permutations(memory, 2):
            if any(_overlap(written, each) for each in other):
                what = f"an output in a group of {comm.name} overlaps other memory of the group"
                raise self._misuse(INVALID_USAGE, what)

    # -- launches --------------------------------------------------------------------------------

    def _enter(self, function: str) -> None:
        """Begin a call or a group."""
        with self._lock:
            thread = threading.get_ident()
            if self._depth and self._thread != thread:
                what = f"{function} while a call or group of another thread has not returned"
                raise self._misuse(INVALID_USAGE, what)
            self._thread = thread
            self._depth += 1

    def _exit(self) -> None:
        """End a call or a group; the outermost launches the kernels, or raises what failed in it."""
        calls, failed = self._calls, self._failed
        try:
            if self._depth == 1:
                self._calls, self._failed = [], None
                if failed is not None:
                    raise failed
                self._launch(calls)
        finally:
            with self._lock:
                self._depth -= 1

    def _call(self, call: _Call, comm: int, stream: int) -> None:
        function = call.signature.function
        self._enter(function)
        failed: Exception | None = None
        try:
            time.sleep(0)  # let other threads call
            found = self._usable(comm, function)
            self._check(call, found)
            try:
                on = self._runtime.stream_of(stream)
            except KeyError:
                raise self._misuse(INVALID_ARGUMENT, f"{function}: no stream {stream:#x}") from None
            # NCCL launches kernels in a thread of its own, except that of an average on one rank.
            if found.size == 1 and call.signature.op == Reduction.AVG:
                device = self._runtime.current_device()
                if device != on.device:
                    what = f"{function} on {on.device} in a thread whose current device is {device}"
                    raise self._misuse(CUDA_ERROR, what)
            self._calls.append((found, on, call))
        except Exception as error:
            failed = self._failed = error
        self._exit()
        if failed is not None:
            raise failed

    def _launch(self, calls: Sequence[tuple[_Communicator, FakeStream, _Call]]) -> None:
        kernels: dict[_Communicator, _Kernel] = {}
        for comm, stream, call in calls:
            kernel = kernels.setdefault(comm, _Kernel(comm, stream))
            kernel.calls.append(call)
            if kernel.stream is not stream:
                raise self._misuse(INVALID_USAGE, f"a group uses {comm.name} on several streams")
        for kernel in kernels.values():
            self._check_kernel(kernel)
        connected = [kernel.comm.begin_launch(kernel) for kernel in kernels.values()]
        at_once = not self._launch_s or all(kernel.at_once for kernel in kernels.values())
        if at_once and all(connected):
            self._enqueue([*kernels.values()])
        else:
            for kernel in kernels.values():
                kernel.stream.reserved = functools.partial(self._note_early_use, kernel)
            start_thread(self._launch_later, [*kernels.values()], all(connected))

    def _launch_later(self, kernels: Sequence[_Kernel], connected: bool) -> None:
        """Enqueue kernels as NCCL's thread does, which carries out each launch since NCCL 2.23."""
        if not connected:
            for kernel in kernels:
                kernel.comm.request_connections(kernel)
            for kernel in kernels:
                kernel.comm.wait_connected(kernel)
        time.sleep(self._launch_s if connected else self._connect_s)
        self._enqueue(kernels)

    def _note_early_use(self, kernel: _Kernel) -> None:
        if not kernel.comm.ended:
            name = kernel.comm.name
            self.violations.append(f"work is put on the stream of {name} while its launch is IN_PROGRESS")

    def _enqueue(self, kernels: Sequence[_Kernel]) -> None:
        for kernel in kernels:
            kernel.stream.reserved = None
            run, replay = kernel.comm.run, functools.partial(self._replay, kernel)
            kernel.stream.enqueue(functools.partial(run, kernel), replay)
        for kernel in kernels:
            kernel.comm.end_launch()

    def _replay(self, captured: _Kernel) -> Callable[[], None]:
        """Launch a captured kernel; return its work."""
        comm = captured.comm
        if comm.ended:
            self.violations.append(f"replay of a graph with a kernel of {comm.name}, which has ended")
        kernel = _Kernel(comm, captured.stream, captured.calls)
        comm.number(kernel)
        return functools.partial(comm.run, kernel)


@dataclass
class _Kernel:
    """The calls of a group for one communicator.

    Attributes:
        number: of earlier kernels of the communicator on this rank.
    """

    comm: _Communicator
    stream: FakeStream
    calls: list[_Call] = field(default_factory=list)
    number: int = 0

    @property
    def at_once(self) -> bool:
        """Whether the calling thread launches it: collectives on one rank, but not messages."""
        return self.comm.size == 1 and not any(call.signature.point_to_point for call in self.calls)

    def connections(self) -> set[Hashable]:
        if self.at_once:
            return set()
        return {each for call in self.calls for each in call.connections(self.comm.rank)}

    def read(self) -> list[tuple[Signature, bytes]]:
        """The signatures and inputs of its calls."""
        memory = [call.memory(self.comm.rank, self.comm.size)[0] for call in self.calls]
        inputs = [ctypes.string_at(address, count) if count else b"" for address, count in memory]
        return [(call.signature, data) for call, data in zip(self.calls, inputs, strict=True)]

    def write(self, outputs: Sequence[bytes]) -> None:
        for call, data in zip(self.calls, outputs, strict=True):
            address, count = call.memory(self.comm.rank, self.comm.size)[1]
            assert len(data) == count
            if count:
                ctypes.memmove(address, data, count)


class _Communicator:
    """One rank of a communicator.  Its thread connects to the hub and receives from it."""

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self.size, self.rank = size, rank
        self.name = f"rank {rank} of {size}"
        self.finalized = False
        #: those that have its kernels
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self._unique_id = unique_id
        # Guards all that follows, and the memory of kernels.
        self._changed = threading.Condition()
        self._ready = self._launching = self._finalizing = self._ended = False
        self._error: int | None = None
        self._connected: set[Hashable] = set()
        self._launched = self._done = 0
        #: the outputs of the running kernel
        self._outputs: Sequence[bytes] | None = None
        self._hub: Connection | None = None
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"fake nccl {self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def state(self) -> int:
        with self._changed:
            if self.finalized:
                return Result.SUCCESS
            if self._error is not None:
                return self._error
            self._continue_finalize()
            busy = not self._ready or self._launching or self._finalizing
            return Result.IN_PROGRESS if busy else Result.SUCCESS

    def fail(self, result: int) -> None:
        with self._changed:
            self._error = result

    def end(self) -> None:
        """Disconnect; kernels end and do not read or write memory any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            if self._hub is not None:
                self._hub.shutdown()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(TIMEOUT_S)

    # -- kernels ---------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ended or self._finalizing

    def number(self, kernel: _Kernel) -> None:
        with self._changed:
            kernel.number = self._launched
            self._launched += 1

    def begin_launch(self, kernel: _Kernel) -> bool:
        """Number a kernel that will run; return whether it has all connections."""
        with self._changed:
            if kernel.stream.graph is None:
                self.number(kernel)
            else:
                self.graphs.add(kernel.stream.graph)
            self._launching = True
            return kernel.connections() <= self._connected

    def request_connections(self, kernel: _Kernel) -> None:
        with self._changed:
            missing = kernel.connections() - self._connected
        self._send("connect", missing)

    def wait_connected(self, kernel: _Kernel) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or kernel.connections() <= self._connected)

    def end_launch(self) -> None:
        with self._changed:
            self._launching = False

    def run(self, kernel: _Kernel) -> None:
        """Run a kernel on its stream, after those that were launched before on any stream."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._done == kernel.number)
            if self._ended:
                return
            calls = kernel.read()
        self._send("kernel", calls)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._outputs is not None)
            if self._ended:
                return
            assert self._outputs is not None
            kernel.write(self._outputs)
            self._outputs = None
            self._done += 1
            self._changed.notify_all()
        self._continue_finalize()

    def finalize(self) -> None:
        with self._changed:
            self._finalizing = True
        self._continue_finalize()

    def _continue_finalize(self) -> None:
        with self._changed:
            complete = self._finalizing and self._done == self._launched and not self.graphs
        if complete:
            self._send("finalize")

    # -- the hub ---------------------------------------------------------------------------------

    def _send(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(WireError):  # which the thread detects
            assert self._hub is not None
            self._hub.send(pickle.dumps(message), math.inf)

    def _run(self) -> None:
        try:
            with connect_to_hub(self._unique_id) as hub:
                hub.send(pickle.dumps((self.size, self.rank)), math.inf)
                with self._changed:
                    self._hub = hub
                    if self._ended:
                        return
                while True:
                    self._receive(*pickle.loads(hub.recv(math.inf)))
        except WireError:
            self._receive("lost", None)

    def _receive(self, kind: str, value: Any) -> None:
        with self._changed:
            if kind == "lost":
                self._error = REMOTE_ERROR if self._error is None else self._error
            elif kind == "ready":
                self._ready = True
            elif kind == "connected":
                self._connected.add(value)
            elif kind == "outputs":
                self._outputs = value
            elif kind == "finalized":
                self.finalized = True
            self._changed.notify_all()
