"""An engine: a rank asks it for the operations of the library that it measures."""

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
    """The engine does not know what was asked for; the message says why."""


class Engine(ABC):
    """One rank of a library, connected to the others."""

    rank: int
    size: int
    version: str

    @abstractmethod
    def empty(self, variant: str, dtype: str, count: int) -> tuple[Any, Values]:
        """A buffer as the library wants it, and the same memory as an array."""

    @abstractmethod
    def operation(self, name: str, x: Any, out: Any, variant: str) -> Call:
        """A function that performs the operation once.  Raises ``Unsupported``."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def checked(self, variant: str) -> bool:
        """Whether a result of this variant can be compared with the expected one."""
        return True

    def release(self) -> None:
        """All buffers are gone; give their memory back where that needs saying."""

    def close(self) -> None:
        """Leave in order."""

    # -- what only the small benchmarks need ---------------------------------------------------

    def start(self, x: Any) -> Any:
        """Submit an all-reduce; the result has ``wait()``."""
        raise Unsupported("it has no asynchronous form here")

    def new_group(self) -> Call:
        """Make a group of all ranks; what is returned closes it."""
        raise Unsupported("it makes no groups here")

    def ping_pong(self, send: Call, receive: Call) -> Call:
        """Rank 0 sends and rank 1 sends back; the others do nothing."""
        if self.rank > 1:
            return lambda: None
        first, second = (send, receive) if self.rank == 0 else (receive, send)

        def both() -> None:
            first()
            second()

        return both


def torch_values(x: Any) -> Values:
    """The memory of a tensor as an array; bfloat16, which numpy lacks, as bits."""
    import torch

    values: Values = x.view(torch.int16).numpy().view(np.uint16) if x.dtype is torch.bfloat16 else x.numpy()
    return values
