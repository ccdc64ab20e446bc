"""Torch's own samples of its operators, here and on a node: values, shapes, strides, dtypes and gradients."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch

from shoal.controller import Master
from tests.controller.exceptions import EXCEPTIONS, NOT_IN_EVERY_RELEASE, ROUNDED, WITHOUT_ELEMENTS
from tests.controller.sweeping import WAYS, compare, name_of, op_db, sweep

#: how many parts the sweep is cut into; `make test` runs one
PARTS = 8
#: and a part of the other ways, and dtypes, in which an operator is used
FEWER = 48
#: `make stress STRESS=short` goes through the first of the parts
SHORT = os.environ.get("STRESS") == "short"
SWEPT = range(1 if SHORT else PARTS)
OTHER_WAYS = [way for way in WAYS if way != "plainly"]
DTYPES = [torch.bfloat16, torch.complex64, torch.bool]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Let torch warn of nothing that its samples do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _checked(master: Master, part: slice, dtype: torch.dtype, samples: int, way: str = "plainly") -> None:
    ops = [op for op in op_db() if name_of(op) not in EXCEPTIONS]
    wrong = sweep(master, ops[part], dtype, samples, way)
    assert not wrong, "\n\n".join(wrong)


def test_operators_do_on_a_node_what_they_do_here(master: Master) -> None:
    _checked(master, slice(0, None, PARTS), torch.float32, 1)


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_operators_do_so_in_other_ways(master: Master, way: str) -> None:
    _checked(master, slice(1, None, FEWER), torch.float32, 1, way)


@pytest.mark.stress
@pytest.mark.parametrize("part", SWEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_operators_do_on_a_node_what_they_do_here(master: Master, dtype: torch.dtype, part: int) -> None:
    _checked(master, slice(part, None, PARTS), dtype, 3)


@pytest.mark.stress
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_all_operators_do_so_in_other_ways(master: Master, way: str) -> None:
    _checked(master, slice(0, None, PARTS if SHORT else 1), torch.float32, 1, way)


@pytest.mark.stress
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_operators_do_so_in_other_dtypes(master: Master, dtype: torch.dtype) -> None:
    _checked(master, slice(0, None, PARTS if SHORT else 1), dtype, 1)


def test_the_exceptions_are_few_and_are_entries(master: Master) -> None:
    ops = {name_of(op) for op in op_db()}
    assert ops | NOT_IN_EVERY_RELEASE >= EXCEPTIONS.keys() | ROUNDED.keys() | WITHOUT_ELEMENTS
    assert not EXCEPTIONS.keys() & (ROUNDED.keys() | WITHOUT_ELEMENTS)
    assert len(EXCEPTIONS) <= 0.05 * len(ops)


def test_each_exception_is_still_one(master: Master) -> None:
    for op in op_db():
        if name_of(op) in EXCEPTIONS:
            assert compare(master, op, torch.float32, 3) is not None, name_of(op)
