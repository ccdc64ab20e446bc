"""The check that all ranks have equal arguments, which the sizes of their messages would not reveal.

The ranks compare digests of textual descriptions.  They exchange the descriptions only if the digests differ,
so that the error can list the differences.  ``cpp/include/shoal/torch/consistency.h`` has the same check for
ranks in C++.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..common.tensor_bytes import TensorBytes
from ..errors import ModelMismatch, UsageError
from ..group import ProcessGroup

#: Maximum number of differences shown for one rank.
_MAX_NAMES_SHOWN = 5

#: Maximum depth of nested values in a :class:`Digest`.
_MAX_DEPTH = 1000


class Digest:
    """A SHA-256 digest of values, equal on all ranks that add bitwise equal values."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, value: Any) -> None:
        """Add a tensor, a dict, list or tuple of values, or the ``repr`` of any other object.

        Raises UsageError for a value that is nested too deeply, or contains itself.
        """
        pending = [(0, name, value)]
        while pending:
            depth, at, value = pending.pop()
            items: list[tuple[Any, Any]] = []
            if isinstance(value, torch.Tensor):
                self._hash.update(f"{at}:{value.dtype}{tuple(value.shape)}\n".encode())
                with TensorBytes(value) as view:
                    self._hash.update(view)
            elif isinstance(value, dict):
                items = sorted(value.items(), key=lambda item: str(item[0]))
            elif isinstance(value, (list, tuple)):
                items = list(enumerate(value))
            else:
                self._hash.update(f"{at}={value!r}\n".encode())
            if items and depth == _MAX_DEPTH:
                raise UsageError(
                    f"{name}: values are nested more than {_MAX_DEPTH} levels deep, or one contains itself; "
                    "ranks compare only values that are less deep"
                )
            pending += [(depth + 1, f"{at}.{key}", each) for key, each in reversed(items)]

    def value(self) -> bytes:
        """Return the digest, 32 bytes."""
        return self._hash.digest()


def check_same(group: ProcessGroup, what: str, items: Sequence[tuple[str, str]]) -> None:
    """Raise on every rank unless ``items`` are equal on all ranks, in the same order.  Collective.

    Args:
        what: the continuation of "the ranks ..." in the error message.
        items: pairs of a unique name and a text to compare.

    Raises ModelMismatch if ``items`` differ; the message lists the differences of each rank from rank 0.
    """
    own = "".join(f"{name}\0{text}\0" for name, text in items).encode()
    digest = torch.frombuffer(bytearray(hashlib.blake2b(own, digest_size=32).digest()), dtype=torch.uint8)
    digests = group.all_gather(digest).wait()
    if all(torch.equal(digest, other) for other in digests):
        return
    descriptions = [_description(text) for text in _exchange(group, own)]
    lines: list[str] = []
    for rank, description in enumerate(descriptions):
        found = _differences(descriptions[0], description)
        lines += [f"  rank {rank}: {line}" for line in found[:_MAX_NAMES_SHOWN]]
        if len(found) > _MAX_NAMES_SHOWN:
            lines.append(f"  rank {rank}: and {len(found) - _MAX_NAMES_SHOWN} more differences")
    raise ModelMismatch(
        f"the ranks {what} (seen by rank {group.rank}); build the same one everywhere:\n" + "\n".join(lines)
    )


def describe_parameter(parameter: torch.Tensor) -> str:
    """Return a text of the properties of a parameter that must be equal on all ranks."""
    return f"{describe_tensor(parameter)}, " + ("requires grad" if parameter.requires_grad else "frozen")


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return a text of the dtype, shape, strides and kind of ``tensor``."""
    if is_lazy(tensor):
        return "without a shape yet"
    if tensor.is_nested:
        return f"{str(tensor.dtype).removeprefix('torch.')}, nested"
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{text} with the layout {tensor.layout}"
    if tensor.is_meta:
        text = f"{text} on the meta device"
    if tensor.is_conj() or tensor.is_neg():
        text = f"{text}, conjugated or negated lazily"
    return text if tensor.is_contiguous() else f"{text} with strides {list(tensor.stride())}"


def _differences(expected: dict[str, str], given: dict[str, str]) -> list[str]:
    lines = [
        f"{name} is {given[name]}, but {value} on rank 0"
        for name, value in expected.items()
        if name in given and given[name] != value
    ]
    lines += [
        f"{name} is missing, {value} on rank 0" for name, value in expected.items() if name not in given
    ]
    lines += [
        f"{name} ({value}) does not exist on rank 0" for name, value in given.items() if name not in expected
    ]
    if not lines:
        for mine, theirs in zip(given, expected, strict=True):
            if mine != theirs:
                return [f"{mine} is registered where rank 0 has {theirs}"]
    return lines


def _description(text: str) -> dict[str, str]:
    parts = text.split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=False))  # the last part is empty


def _exchange(group: ProcessGroup, own: bytes) -> list[str]:
    """Return the descriptions of all ranks."""
    lengths = [int(length) for length in group.all_gather(torch.tensor([len(own)], device="cpu")).wait()]
    parts = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
    text = torch.tensor(list(own), dtype=torch.uint8, device="cpu")
    group.all_gather(parts, text).wait()
    return [bytes(part.tolist()).decode(errors="replace") for part in parts]
