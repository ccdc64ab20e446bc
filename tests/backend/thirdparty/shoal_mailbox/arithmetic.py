"""Reductions over what all ranks sent, in the order of ranks, with numpy."""

from __future__ import annotations

from functools import reduce as fold

import numpy as np
import torch

from shoal.spec import ReduceOp

_UFUNCS = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_OF_BOOL = {"SUM": np.logical_or, "PRODUCT": np.logical_and}


def reduce(op: ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    """``parts`` reduced elementwise, with the rules of shoal: 16-bit floats round once, AVG truncates."""
    dtype = parts[0].dtype
    short = dtype in (torch.float16, torch.bfloat16)
    arrays = [(part.float() if short else part).numpy() for part in parts]
    integer = arrays[0].dtype.kind in "iu"
    with np.errstate(all="ignore"):
        if op.name == "AVG" and integer:
            arrays = [array.astype(f"{array.dtype.kind}8") for array in arrays]
        total = fold(
            _OF_BOOL.get(op.name, _UFUNCS[op.name]) if dtype is torch.bool else _UFUNCS[op.name], arrays
        )
        if op.name == "AVG":
            size = total.dtype.type(len(parts))
            total = (total - np.fmod(total, size)) // size if integer else total / size
    if integer:
        return torch.from_numpy(np.ascontiguousarray(total.astype(parts[0].numpy().dtype)))
    return torch.from_numpy(np.ascontiguousarray(total)).to(dtype)
