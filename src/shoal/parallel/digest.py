"""SHA-256 of tensors, and of dicts and lists of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..common.tensor_bytes import TensorBytes


class Digest:
    """A SHA-256 digest of values, equal on all ranks that add bitwise equal values."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, value: Any) -> None:
        """Add a tensor, a dict, list or tuple of values, or the ``repr`` of any other object."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, dict):
            for key, each in sorted(value.items(), key=lambda item: str(item[0])):
                self.add(f"{name}.{key}", each)
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                self.add(f"{name}.{index}", each)
        else:
            self._hash.update(f"{name}={value!r}\n".encode())

    def value(self) -> bytes:
        """Return the digest, 32 bytes."""
        return self._hash.digest()

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self._hash.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)}\n".encode())
        with TensorBytes(tensor) as view:
            self._hash.update(view)
