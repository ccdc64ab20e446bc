"""The hub of a communicator of :class:`~tests.support.fake_nccl.FakeNccl`: matches the kernels of its ranks.

It is in the process that called ``unique_id``, and ends when all ranks have disconnected.  Messages are
pickled tuples:

* of a rank: its size and number; then "connect" with connections that it needs, "kernel" with signatures and
  inputs of the calls, "finalize"
* of the hub: "ready", "connected" with a connection, "outputs" of the calls of a kernel, "finalized", "lost"
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import secrets
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.backend.nccl.library import DTYPES, Reduction
from shoal.errors import WireError
from shoal.net import Acceptor, Connection, connect, listen

TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}

#: seconds to connect, and to end a thread
TIMEOUT_S = 60.0
_PURPOSE = "fake-nccl"
_LIMIT_BYTES = 2**31
#: port and secret, in 128 bytes
_UNIQUE_ID = struct.Struct("<H32s94x")


class Signature(NamedTuple):
    """The arguments of a call that ranks must agree on.

    ``peer`` is the root of a collective; it and ``op`` are -1 for functions without one.
    """

    function: str
    elements: int
    dtype: int
    op: int = -1
    peer: int = -1

    @property
    def point_to_point(self) -> bool:
        return self.function in ("send", "recv")


def start_thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name=f"fake nccl {function.__name__}", daemon=True)
    thread.start()
    return thread


def connect_to_hub(unique_id: bytes) -> Connection:
    port, secret = _UNIQUE_ID.unpack(unique_id)
    return connect(
        "127.0.0.1", port, secret=secret, purpose=_PURPOSE, timeout=TIMEOUT_S, limit=_LIMIT_BYTES, plain=True
    )


@dataclass
class _Exchange:
    """A kernel of sends and receives that has arrived at the hub; ``missing`` calls are not matched."""

    rank: int
    outputs: list[bytes]
    missing: int


class Hub:
    """Matches the kernels of the ranks, each of which runs one at a time.

    After a rank was lost, no kernel completes any more.
    """

    def __init__(self) -> None:
        secret = secrets.token_bytes(32)
        listener = listen("127.0.0.1", secret=secret)
        self.unique_id = _UNIQUE_ID.pack(listener.getsockname()[1], secret)
        self._acceptor = Acceptor(listener, secret=secret, purpose=_PURPOSE, plain=True)
        self._lock = threading.RLock()
        self._open: set[Connection] = set()
        self._ranks: dict[int, Connection] = {}
        self._size = 0
        self._finalized: set[int] = set()
        self._lost = False
        #: the ranks that need a connection
        self._requested: defaultdict[Any, set[int]] = defaultdict(set)
        #: collectives that have arrived, by rank
        self._waiting: dict[int, list[tuple[Signature, bytes]]] = {}
        #: (function, source, target) -> (kernel, place in it, elements and dtype, data)
        self._messages: defaultdict[Any, deque[tuple[_Exchange, int, Any, bytes]]] = defaultdict(deque)
        self._threads = [start_thread(self._accept)]

    def close(self) -> None:
        self._acceptor.stop()
        self._threads[0].join(TIMEOUT_S)
        with self._lock:
            for connection in self._open:
                connection.shutdown()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _accept(self) -> None:
        with self._acceptor, contextlib.suppress(WireError):  # it was stopped
            while True:
                connection = self._acceptor.accept(math.inf)
                connection.limit = _LIMIT_BYTES
                with self._lock:
                    self._open.add(connection)
                self._threads.append(start_thread(self._serve, connection))

    def _serve(self, connection: Connection) -> None:
        rank = -1
        handlers: dict[str, Callable[..., None]] = {
            "connect": self._connect, "kernel": self._kernel, "finalize": self._finalize,
        }  # fmt: skip
        with connection:
            try:
                size, rank = pickle.loads(connection.recv(math.inf))
                with self._lock:
                    self._join(connection, size, rank)
                while True:
                    function, *arguments = pickle.loads(connection.recv(math.inf))
                    with self._lock:
                        if not self._lost:
                            handlers[function](rank, *arguments)
            except WireError:
                pass
            finally:
                with self._lock:
                    self._leave(connection, rank)

    def _join(self, connection: Connection, size: int, rank: int) -> None:
        if self._lost:
            self._send(connection, "lost")
        self._size = self._size or size
        if size != self._size or rank in self._ranks:
            return  # it stays IN_PROGRESS
        self._ranks[rank] = connection
        if len(self._ranks) == size:
            self._acceptor.stop()
            self._send_all("ready")

    def _leave(self, connection: Connection, rank: int) -> None:
        self._open.remove(connection)
        if rank not in self._finalized:
            self._lost = True
            self._send_all("lost")
        if not self._open:
            self._acceptor.stop()

    def _connect(self, rank: int, connections: set[Any]) -> None:
        for each in connections:
            self._requested[each].add(rank)
            if len(self._requested[each]) == (2 if each[0] == "send" else self._size):
                self._send_all("connected", each)

    def _finalize(self, rank: int) -> None:
        self._finalized.add(rank)
        self._send(self._ranks[rank], "finalized")

    def _kernel(self, rank: int, calls: list[tuple[Signature, bytes]]) -> None:
        if calls[0][0].point_to_point:
            kernel = _Exchange(rank, [b""] * len(calls), len(calls))
            for place, (call, data) in enumerate(calls):
                source, target = (rank, call.peer) if call.function == "send" else (call.peer, rank)
                shape = call.elements, call.dtype
                self._messages[call.function, source, target].append((kernel, place, shape, data))
                self._match(source, target)
            return
        self._waiting[rank] = calls
        arrived = [self._waiting[each] for each in sorted(self._waiting)]
        if len(arrived) < self._size or any(
            [signature for signature, _ in each] != [signature for signature, _ in calls] for each in arrived
        ):
            return
        self._waiting.clear()
        results = [
            _results(signature, [each[place][1] for each in arrived])
            for place, (signature, _) in enumerate(calls)
        ]
        for each in range(self._size):
            self._send(self._ranks[each], "outputs", [result[each] for result in results])

    def _match(self, source: int, target: int) -> None:
        """Deliver messages in their order, until one does not fit its receive."""
        sent, posted = (self._messages[function, source, target] for function in ("send", "recv"))
        while sent and posted and sent[0][2] == posted[0][2]:
            (sender, _, _, data), (receiver, place, _, _) = sent.popleft(), posted.popleft()
            receiver.outputs[place] = data
            for kernel in (receiver, sender):
                kernel.missing -= 1
                if not kernel.missing:
                    self._send(self._ranks[kernel.rank], "outputs", kernel.outputs)

    def _send_all(self, kind: str, value: Any = None) -> None:
        for connection in self._ranks.values():
            self._send(connection, kind, value)

    def _send(self, connection: Connection, kind: str, value: Any = None) -> None:
        with contextlib.suppress(WireError):  # which its thread detects
            connection.send(pickle.dumps((kind, value)), math.inf)


# -- arithmetic ------------------------------------------------------------------------------------------


def _results(signature: Signature, inputs: Sequence[bytes]) -> Sequence[bytes]:
    """The output of each rank of a collective."""
    function, _, dtype, op, root = signature
    size = len(inputs)
    if function == "broadcast":
        return [inputs[root]] * size
    if function == "all_gather":
        return [b"".join(inputs)] * size
    total = _reduced(inputs, dtype, op)
    if function == "all_reduce":
        return [total] * size
    if function == "reduce":
        return [total if rank == root else b"" for rank in range(size)]
    part = len(total) // size
    return [total[rank * part : (rank + 1) * part] for rank in range(size)]


_FLOAT_OPS: dict[int, Callable[..., torch.Tensor]] = {
    Reduction.SUM: torch.add, Reduction.AVG: torch.add, Reduction.PRODUCT: torch.mul,
    Reduction.MAX: torch.fmax, Reduction.MIN: torch.fmin,
}  # fmt: skip
_INTEGER_OPS: dict[int, Callable[..., Any]] = {
    Reduction.SUM: np.add, Reduction.AVG: np.add, Reduction.PRODUCT: np.multiply,
    Reduction.MAX: np.maximum, Reduction.MIN: np.minimum,
}  # fmt: skip


def _reduced(inputs: Sequence[bytes], dtype: int, op: int) -> bytes:
    """Reduce in the order of ranks, and round after each."""
    if not inputs[0]:
        return b""
    kind = TORCH_DTYPES[dtype]
    if kind.is_floating_point:
        floats = [torch.frombuffer(bytearray(data), dtype=kind) for data in inputs]
        if op == Reduction.AVG:  # NCCL multiplies the inputs
            floats = [each * torch.tensor(1 / len(inputs), dtype=kind) for each in floats]
        return bytes(functools.reduce(_FLOAT_OPS[op], floats).view(torch.uint8).numpy())
    integers = [np.frombuffer(data, dtype=str(kind).removeprefix("torch.")) for data in inputs]
    total = functools.reduce(_INTEGER_OPS[op], integers)
    if op == Reduction.AVG:  # truncated, while // rounds down
        total = total // len(inputs) + ((total < 0) & (total % len(inputs) != 0))
    return bytes(total.astype(integers[0].dtype))
