"""Tests that every backend must pass.  They need pytest.

    from shoal.testing.conformance import BackendConformance

    class TestPigeons(BackendConformance):
        backend = "carrier-pigeon"

- ``suite``: the tests.
- ``cases``: every collective with every dtype and reduction, and the comparison with the reference.
- ``reference``: the expected results, computed without shoal.
"""

import pytest

# Before the import, so that failed assertions show their values.
pytest.register_assert_rewrite(f"{__name__}.suite", f"{__name__}.cases")

from .suite import BackendConformance  # noqa: E402

__all__ = ["BackendConformance"]
