"""Check of the codes that Python and the core share."""

from __future__ import annotations

from ... import _core
from ...spec import REDUCTIONS, OpKind


def check_codes() -> None:
    """Refuse a core that numbers operations or reductions differently than :mod:`shoal.spec`.

    Raises:
        ImportError: ``shoal._core`` was built from other sources than these.
    """
    codes = [(kind.name, kind.value, _core.Kind[kind.name].value) for kind in OpKind]
    codes += [(op.name, op.code, _core.kernels.RedOp[op.name].value) for op in REDUCTIONS]
    for name, expected, code in codes:
        if code != expected:
            raise ImportError(
                f"shoal._core has the code {code} for {name}, expected {expected}: it was built from other "
                "sources; install shoal again"
            )
