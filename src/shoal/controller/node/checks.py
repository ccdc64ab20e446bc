"""Checks of linear algebra results that poison the results if they fail.

Torch's own check has neither results nor the checked tensors as operands, so its failure would leave e.g. the
factor of a matrix that cannot be factorized unpoisoned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.never_compile import never_compile

#: namespace of the operators
NAMESPACE = "shoal_check"
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_library.define("linalg(Tensor info, str name, bool is_matrix, Tensor(a!)[] made) -> ()")  # type: ignore[no-untyped-call]


@never_compile
def _linalg(info: torch.Tensor, name: str, is_matrix: bool, made: Sequence[torch.Tensor]) -> None:
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)


_library.impl("linalg", _linalg, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
