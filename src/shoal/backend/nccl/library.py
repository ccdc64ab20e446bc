"""The functions of NCCL that shoal calls, and their binding by nccl4py."""

from __future__ import annotations

import ctypes
import enum
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch

from ...common.formatting import describe_error
from ...errors import ConfigurationError

#: the oldest release that is used
LEAST_VERSION = 22100
UNIQUE_ID_BYTES = 128


class Result(enum.IntEnum):
    """Values of ``ncclResult_t`` that shoal distinguishes; all other values are errors."""

    SUCCESS = 0
    IN_PROGRESS = 7


class Reduction(enum.IntEnum):
    """Values of ``ncclRedOp_t``."""

    SUM = 0
    PRODUCT = 1
    MAX = 2
    MIN = 3
    AVG = 4


#: torch dtype -> ``ncclDataType_t``, of the dtypes that NCCL can reduce
DTYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class Nccl(Protocol):
    """Functions of NCCL, by the names and with the arguments of ``nccl.h``.

    Streams (``cudaStream_t``) and addresses of memory are integers.  Communicators are opaque, and
    nonblocking: a call may return before it is carried out.  Then :meth:`async_error` is IN_PROGRESS, nothing
    else but ``abort`` may be called for the communicator, and work is not on its stream yet.

    All functions raise an exception for results other than SUCCESS and IN_PROGRESS.
    """

    def version(self) -> int:
        """The version as in ``NCCL_VERSION_CODE``: 22809 for 2.28.9."""

    def unique_id(self) -> bytes:
        """128 bytes that identify a new communicator, for all its ranks."""

    def init(self, size: int, unique_id: bytes, rank: int, max_ctas: int | None) -> Any:
        """Return a nonblocking communicator on the current device; see :meth:`async_error`.

        ``max_ctas`` is the largest number of thread blocks of a kernel; None: NCCL chooses.
        """

    def async_error(self, comm: Any) -> int:
        """The state of a communicator: SUCCESS, IN_PROGRESS or the result of an error."""

    def last_error(self, comm: Any) -> str:
        """A description of the last error in this process, may be empty."""

    def error_string(self, result: int) -> str:
        """A description of a result."""

    def finalize(self, comm: Any) -> None:
        """Begin to complete what was started; complete when :meth:`async_error` is SUCCESS again."""

    def destroy(self, comm: Any) -> None:
        """Free a communicator that is finalized."""

    def abort(self, comm: Any) -> None:
        """End the work of a communicator in any state, and destroy it."""

    def group_start(self) -> None:
        """Collect the calls of this thread until :meth:`group_end`, which launches them together."""

    def group_end(self) -> None:
        """See :meth:`group_start`."""

    def all_reduce(
        self, send: int, receive: int, count: int, dtype: int, op: int, comm: Any, stream: int
    ) -> None: ...

    def reduce(
        self, send: int, receive: int, count: int, dtype: int, op: int, root: int, comm: Any, stream: int
    ) -> None: ...

    def broadcast(
        self, send: int, receive: int, count: int, dtype: int, root: int, comm: Any, stream: int
    ) -> None: ...

    def all_gather(self, send: int, receive: int, count: int, dtype: int, comm: Any, stream: int) -> None: ...

    def reduce_scatter(
        self, send: int, receive: int, count: int, dtype: int, op: int, comm: Any, stream: int
    ) -> None: ...

    def send(self, send: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> None: ...

    def recv(self, receive: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> None: ...


class BoundNccl:
    """The NCCL library of this process, called through the module ``nccl.bindings.nccl`` of nccl4py."""

    def __init__(self, module: ModuleType) -> None:
        bindings: Any = module
        self._bindings = bindings
        self.version = bindings.get_version
        self.async_error = bindings.comm_get_async_error
        self.last_error = bindings.get_last_error
        self.error_string = bindings.get_error_string
        self.finalize = bindings.comm_finalize
        self.destroy = bindings.comm_destroy
        self.abort = bindings.comm_abort
        self.group_start = bindings.group_start
        self.group_end = bindings.group_end
        self.all_reduce = bindings.all_reduce
        self.reduce = bindings.reduce
        self.broadcast = bindings.broadcast
        self.all_gather = bindings.all_gather
        self.reduce_scatter = bindings.reduce_scatter
        self.send = bindings.send
        self.recv = bindings.recv

    def unique_id(self) -> bytes:
        made = self._bindings.get_unique_id()  # has the memory, so it must live until that is copied
        return ctypes.string_at(made.ptr, UNIQUE_ID_BYTES)

    def init(self, size: int, unique_id: bytes, rank: int, max_ctas: int | None) -> Any:
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id of NCCL has {UNIQUE_ID_BYTES} bytes, got {len(unique_id)}")
        ident = self._bindings.UniqueId()
        ctypes.memmove(ident.ptr, unique_id, UNIQUE_ID_BYTES)
        config = self._bindings.Config()
        config.blocking = 0
        if max_ctas is not None:
            config.max_ctas = max_ctas
        return self._bindings.comm_init_rank_config(size, ident, rank, config)


def load() -> Nccl:
    """Return the NCCL library that torch uses.

    Raises:
        ConfigurationError: nccl4py or the library is missing, or the library is too old.
    """
    try:
        bindings = import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise ConfigurationError(
            f"backend='nccl' needs the package nccl4py: {error}; pip install 'shoal[nccl]'"
        ) from None
    nccl = BoundNccl(bindings)
    try:
        version = nccl.version()
    except Exception as error:
        raise ConfigurationError(
            f"backend='nccl' finds no NCCL library ({describe_error(error).strip()}); install a torch for "
            "CUDA, or pip install nvidia-nccl-cu13"
        ) from None
    if version < LEAST_VERSION:
        raise ConfigurationError(
            f"backend='nccl' needs NCCL {version_text(LEAST_VERSION)} or newer, found {version_text(version)}"
        )
    return nccl


def version_text(version: int) -> str:
    """The version for people: "2.28.9" for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
