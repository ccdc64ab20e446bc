"""Files that ``torch.load(file, map_location="node:1")`` reads to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedOperation
from ..protocol.operators import special
from . import current
from .dispatch import upload
from .tensor import RemoteTensor, rebind

#: before torch's own way for such devices, which counts on memory of the device here
_PRIORITY = 15


class _Read(torch.UntypedStorage):
    """Memory of a file, which is to be a node's.

    Attributes:
        node: whose.
        there: its bytes there; None: no tensor needed them yet.
    """

    node: torch.device
    there: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """On which torch makes the tensors of this memory."""
        return self.node

    def _set_from_file(self, *args: Any) -> None:
        """Read the bytes, as torch does of files in its old form when it has made the tensors."""
        super()._set_from_file(*args)  # type: ignore[no-untyped-call]
        if self.there is not None:
            self.there.copy_(self.bytes())

    def bytes(self) -> torch.Tensor:
        """The bytes, as a tensor here."""
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(self)


def _restore(storage: Any, location: str) -> Any:
    """Take what torch has read, if it is for a node; torch makes tensors of it with ``set_``."""
    if location.partition(":")[0] != "node":
        return None
    device = torch.device(location)
    read = _Read(storage.nbytes())  # type: ignore[no-untyped-call]
    read.copy_(storage)
    read.node = torch.device("node", current.master().space(device.index or 0).index)
    return read


@special("aten::set_.source_Storage_storage_offset", "aten::set_.source_Storage")
def _set(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, storage, *layout = args
    if type(tensor) is not RemoteTensor:
        return NotImplemented
    if type(storage) is not _Read or not layout:
        raise UnsupportedOperation(
            f"a tensor on {tensor.device} cannot be made of a storage, whose memory is in another process: "
            "use views such as x.as_strided, x.cpu() for the elements, and files of torch.save with "
            "torch.load(file, map_location=...)"
        )
    if storage.there is None:
        storage.there = upload(tensor.handle.space, storage.bytes())
    offset, shape, *stride = layout
    known = storage.there.view(tensor.dtype).as_strided(shape, stride[0] if stride else (), offset)
    rebind(tensor, known.handle)  # type: ignore[attr-defined]
    return tensor


def register() -> None:
    """Let ``torch.load`` know nodes."""
    torch.serialization.register_package(_PRIORITY, lambda storage: None, _restore)
