"""Checks of what an operator of linear algebra has made, which spoil that where they fail.

Torch's own check has no result, and takes the operator's report alone: a factor of a matrix that has none
would keep its elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.uncompiled import uncompiled

#: beginning of the operators' names
NAMESPACE = "shoal_check"
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_library.define("linalg(Tensor info, str name, bool is_matrix, Tensor(a!)[] made) -> ()")  # type: ignore[no-untyped-call]


@uncompiled
def _linalg(info: torch.Tensor, name: str, is_matrix: bool, made: Sequence[torch.Tensor]) -> None:
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)


_library.impl("linalg", _linalg, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
