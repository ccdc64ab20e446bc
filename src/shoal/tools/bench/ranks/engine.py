"""The interface of a measured library on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Call = Callable[[], object]
#: float32, or uint16 for the bits of bfloat16
Values = npt.NDArray[Any]

STORAGE: dict[str, Any] = {"fp32": np.float32, "bf16": np.uint16}


class Unsupported(Exception):
    """The engine does not support the request; the message has the reason."""


class ContenderRank(ABC):
    """One rank of a library, connected to the others."""

    rank: int
    size: int
    version: str

    @abstractmethod
    def empty(self, variant: str, dtype: str, count: int) -> tuple[Any, Values]:
        """Create a buffer for the library; return it with its memory as an array."""

    @abstractmethod
    def operation(self, name: str, x: Any, out: Any, variant: str) -> Call:
        """Return a function that performs the operation once, or raise ``Unsupported``."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def checked(self, variant: str) -> bool:
        """Whether a result of this variant can be compared with the expected one."""
        return True

    def release(self) -> None:
        """Release memory after all buffers were deleted, if the engine requires it."""

    def close(self) -> None:
        """Disconnect."""

    # -- used by the small benchmarks only -----------------------------------------------------

    def start(self, x: Any) -> Any:
        """Submit an all-reduce; the result has ``wait()``."""
        raise Unsupported("it has no asynchronous form here")

    def new_group(self) -> Call:
        """Create a group of all ranks; return the function that closes it."""
        raise Unsupported("it makes no groups here")

    def ping_pong(self, send: Call, receive: Call) -> Call:
        """Combine calls such that rank 0 sends first and rank 1 replies; the others do nothing."""
        if self.rank > 1:
            return lambda: None
        first, second = (send, receive) if self.rank == 0 else (receive, send)

        def both() -> None:
            first()
            second()

        return both


def torch_values(x: Any) -> Values:
    """The memory of a tensor as an array; for bfloat16, which numpy lacks, as bits."""
    import torch

    values: Values = x.view(torch.int16).numpy().view(np.uint16) if x.dtype is torch.bfloat16 else x.numpy()
    return values
