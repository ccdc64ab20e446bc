"""A letter: what one rank posts to another, a line of JSON and the bytes of a tensor."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from shoal.spec import DTYPE_CODES, DTYPES_BY_CODE


@dataclass(frozen=True)
class Letter:
    """One message.

    Attributes:
        slot: which operation it belongs to: "number 5", "key 77" or "tag 3"; "" for the kinds below.
        source: the rank that posted it.
        call: what that rank called, to be compared with what the receiver called.
        dtype, shape: of the tensor.
        event: "", or "bye" (the source closed its channel), "broken" (with the error), or "stop".
        error, text, ranks: class name, message and lost ranks of what broke the channel.
        payload: the bytes of the tensor.
    """

    slot: str
    source: int
    call: str = ""
    dtype: int = -1
    shape: tuple[int, ...] = ()
    event: str = ""
    error: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()
    payload: bytes = b""

    def encode(self) -> bytes:
        header = asdict(self)
        del header["payload"]
        return json.dumps(header).encode() + b"\n" + self.payload

    @staticmethod
    def decode(data: bytes) -> Letter:
        header, _, payload = data.partition(b"\n")
        fields = json.loads(header)
        return Letter(**{**fields, "shape": tuple(fields["shape"]), "payload": payload})

    @staticmethod
    def holding(x: torch.Tensor, slot: str, source: int, call: str) -> Letter:
        return Letter(slot, source, call, DTYPE_CODES[x.dtype], tuple(x.shape), payload=contents(x))

    def tensor(self) -> torch.Tensor:
        """A new tensor with what the letter holds."""
        x = torch.empty(self.shape, dtype=DTYPES_BY_CODE[self.dtype])
        fill([x], self.payload)
        return x


def contents(x: torch.Tensor) -> bytes:
    """The memory of a contiguous tensor."""
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())


def fill(xs: Sequence[torch.Tensor], data: bytes) -> None:
    """Write ``data`` into the memory of contiguous tensors, one after another."""
    position = 0
    for x in xs:
        size = x.numel() * x.element_size()
        # Not copy_(): the tensor may require gradients or be an inference tensor.
        ctypes.memmove(x.data_ptr(), data[position : position + size], size)
        position += size
