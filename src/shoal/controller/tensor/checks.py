"""The master's side of the error checks of ``torch.linalg`` results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..node import checks
from ..protocol.operators import special
from .dispatch import dispatch
from .tensor import share


def _passes(info: torch.Tensor, name: str, is_matrix: bool, made: Sequence[torch.Tensor]) -> None:
    pass


torch.library.register_fake(f"{checks.NAMESPACE}::linalg", _passes)


@special("aten::_linalg_check_errors")
def _check(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    info, name = args
    made = getattr(info.handle, "proved", None)
    if made is None:
        return NotImplemented
    given = info, name, kwargs["is_matrix"], [share(each) for each in made]
    return dispatch(torch.ops.shoal_check.linalg.default, given, {})
