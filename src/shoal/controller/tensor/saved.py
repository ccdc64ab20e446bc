"""Loading files to a node with ``torch.load(file, map_location="node:1")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedOperation
from ..protocol.operators import special
from . import current
from .dispatch import upload
from .tensor import RemoteTensor, rebind

#: before torch's default handler of such devices, which expects device memory in this process
_PRIORITY = 15


class _Read(torch.UntypedStorage):
    """A storage read from a file for `node`; `there` has its bytes on the node once needed."""

    node: torch.device
    there: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which torch creates the tensors of this storage."""
        return self.node

    def _set_from_file(self, *args: Any) -> None:
        """Read the bytes; for legacy files torch calls this after it has created the tensors."""
        super()._set_from_file(*args)  # type: ignore[no-untyped-call]
        if self.there is not None:
            self.there.copy_(self.bytes())

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(self)


def _restore(storage: Any, location: str) -> Any:
    """Convert a storage with a node as its location; torch creates tensors from it with ``set_``."""
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
            f"a tensor on {tensor.device} cannot be made from a storage, whose memory is in another process: "
            "use views such as x.as_strided, x.cpu() for the elements, or torch.load(file, map_location=...) "
            "for files of torch.save"
        )
    if storage.there is None:
        storage.there = upload(tensor.handle.space, storage.bytes())
    offset, shape, *stride = layout
    known = storage.there.view(tensor.dtype).as_strided(shape, stride[0] if stride else (), offset)
    rebind(tensor, known.handle)  # type: ignore[attr-defined]
    return tensor


def register() -> None:
    """Register nodes as a location with ``torch.load``."""
    torch.serialization.register_package(_PRIORITY, lambda storage: None, _restore)
