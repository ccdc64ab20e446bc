"""Functions take what torch's take, by name and in order, and the page tells of every name of torch's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch.distributed as theirs
from torch.distributed import distributed_c10d

import shoal.distributed as ours
from tests.support import releases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
#: of the package, but none of its business
_NOISE = {"config", "log", "timedelta"}


def _parameters(fn: object) -> list[str]:
    return [name for name in inspect.signature(fn).parameters if not name.startswith("_")]


_COMMON = [
    name for name in ours.__all__ if type(getattr(theirs, name, None)) is FunctionType or name == "P2POp"
]


#: of torch 2.14 and later; the page says why
_NOT_TAKEN = {"weights_only", "enable_reconfigure"}


@pytest.mark.parametrize("name", _COMMON)
def test_the_arguments_are_torchs(name: str) -> None:
    expected = [each for each in _parameters(getattr(theirs, name)) if each not in _NOT_TAKEN]
    later = releases.LATER_PARAMETERS.get(name, set()).difference(expected)
    assert [each for each in _parameters(getattr(ours, name)) if each not in later] == expected
    for each in _NOT_TAKEN:
        assert f"`{each}`" in PAGE.read_text()


def test_works_and_stores_have_the_methods_of_torchs() -> None:
    work = {name for name in dir(theirs.Work) if not name.startswith("_")}
    missing = {"block_current_stream", "boxed", "get_future_result", "unbox"}
    # Work.timeout is of torch 2.14.
    assert work - set(dir(ours.Work)) - {"timeout"} == missing
    store = {name for name in dir(theirs.Store) if not name.startswith("_")}
    for kind in (ours.TCPStore, ours.FileStore, ours.HashStore, ours.PrefixStore):
        assert store - set(dir(kind)) <= {"barrier", "queue_len", "queue_pop", "queue_push", "timeout"}


def _public_names() -> set[str]:
    names = {name for name in dir(theirs) if not name.startswith("_")} | set(distributed_c10d.__all__)
    values = {name: getattr(theirs, name) for name in names - _NOISE}
    return {name for name, value in values.items() if type(value) is not ModuleType}


def _table() -> dict[str, str]:
    """Name -> "here", "differs" or "not here", as the page says."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("here", "differs", "not here"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                assert name not in found, f"{name} stands twice on the page"
                found[name] = cells[1]
    return found


def test_the_page_tells_of_every_name_of_torchs() -> None:
    assert _public_names() - set(_table()) == set()


def test_the_page_is_right_about_what_is_here() -> None:
    table = _table()
    here = {name for name, where in table.items() if where != "not here"}
    assert {name for name in here if not hasattr(ours, name)} == set()
    assert {name for name in set(table) - here if hasattr(ours, name)} == set()
    assert set(ours.__all__) - here == set()
