"""The declarations of the conformance kit, and its example."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.backend.base import DataChannel, GroupSpec
from shoal.backend.native.channel import NativeBackend
from shoal.backend.registry import register_backend, unregister_backend
from shoal.errors import RemoteError
from shoal.spec import OpKind
from shoal.testing.conformance import BackendConformance
from shoal.testing.conformance.reference import agree, data, factor, reduced

ROOT = Path(__file__).parents[2]


def by_hops(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """A reduction that rounds after each operation."""
    if name == "premul_sum":
        parts = [part * factor(rank) for rank, part in enumerate(parts)]
    if name == "avg":
        parts = [part / len(parts) for part in parts]
    return functools.reduce(torch.mul if name == "product" else torch.add, parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "avg", "product", "premul_sum"])
def test_rounding_per_hop_is_accepted_only_if_it_is_declared(dtype: torch.dtype, name: str) -> None:
    accepted = []
    for size in (1, 2, 3, 4, 8):
        parts = [data(dtype, 5000, rank, 0, name) for rank in range(size)]
        result = by_hops(parts, name)
        accepted.append(agree(result, *reduced(parts, name)))
        assert agree(result, *reduced(parts, name, "per hop"))
        exact, bound = reduced(parts, name, "per hop")
        assert not agree(exact + 2.1 * bound, exact, bound)
    assert accepted[0]
    assert not accepted[-1]


class QuietBackend(NativeBackend):
    """Has no messages."""

    name = "quiet"

    def channel(self, group: GroupSpec) -> Any:
        channel: DataChannel = super().channel(group)
        channel.supports = lambda kind, dtype, op: kind not in (OpKind.SEND, OpKind.RECV)  # type: ignore[method-assign]
        return channel


@pytest.fixture(scope="module", autouse=True)
def _quiet_backend() -> Iterator[None]:
    register_backend("quiet", QuietBackend)
    yield
    unregister_backend("quiet")


class TestWithoutMessages(BackendConformance):
    backend = "quiet"
    messages = False


class Undeclared(BackendConformance):
    backend = "quiet"


def test_a_difference_that_is_not_declared_fails() -> None:
    with pytest.raises(RemoteError, match="cannot do send"):
        Undeclared().test_messages_are_matched_by_tag_and_keep_their_order()
    with pytest.raises(RemoteError, match="cannot do"):
        Undeclared().test_every_collective_dtype_and_reduction_agrees_with_the_reference(2)


class Declared(BackendConformance):
    backend = "native"
    messages = False


def test_a_declared_difference_that_is_none_fails() -> None:
    with pytest.raises(RemoteError, match="DID NOT RAISE"):
        Declared().test_messages_are_sent_or_refused_as_declared()


def test_the_example_for_authors_of_backends_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    assert "class TestMpiexec(BackendConformance)" in program
    program = program.replace("carrier-pigeon", "native")
    program = program.replace('launcher=["mpiexec", "-n", str(size)]', "launcher=None")
    (tmp_path / "test_example.py").write_text(program)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--strict-markers",
         "-k", "mismatch or in_any_order"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)},
    )  # fmt: skip
    assert re.search(r"\n8 passed, \d+ deselected", result.stdout), result.stdout + result.stderr


def test_the_package_of_test_tools_does_not_need_pytest() -> None:
    program = (
        "import sys, shoal.testing\n"
        "shoal.testing.RankPool\n"
        "sys.exit('pytest' in sys.modules or 'cloudpickle' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
