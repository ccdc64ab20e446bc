"""The API reference: every public name has a page and a docstring, and docstrings become Markdown."""

from __future__ import annotations

import importlib
import inspect
import typing

import pytest
from tools import reference

import shoal

NAMES = [name for names in reference.names().values() for name in names]


def test_every_public_name_has_a_page() -> None:
    """A module whose names become public without a page makes building the site an error."""
    shown = [line.removeprefix("::: ") for page in reference.pages().values() for line in page.splitlines()]
    assert {f"shoal.{name}" for name in shoal.__all__ if not name.startswith("_")} <= set(shown)
    assert all(shown.count(name) == 1 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_is(name: str) -> None:
    module, _, short = name.rpartition(".")
    value = getattr(importlib.import_module(module), short)
    is_alias = typing.get_origin(value) is not None  # which Python 3.10 takes for a class
    if not is_alias and (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        assert vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    else:
        lines = [
            reference.comment_above(source, number)
            for path in reference.PACKAGE.rglob("*.py")
            for source in [path.read_text()]
            for number, line in enumerate(source.splitlines(), start=1)
            if line.startswith((f"{short} = ", f"{short}: "))
        ]
        assert any(lines), f"{name} has no comment `#: ...` above it"


def test_docstrings_become_markdown() -> None:
    assert reference.markdown("A :class:`~shoal.Future`.") == "A [`Future`][shoal.Future]."
    assert (
        reference.markdown("See :meth:`close`, :func:`shoal.init`.") == "See `close`, [`init`][shoal.init]."
    )
    assert reference.markdown("Args:\n    a, b: where\n        to begin.\n    c: x") == (
        "Args:\n    a: where\n        to begin.\n    b: where\n        to begin.\n    c: x"
    )
    table = "====  ===\nkind  has\n====  ===\nSEND  [x]\n====  ==="
    assert reference.markdown(f"See:\n\n{table}\n") == f"See:\n\n```text\n{table}\n```\n"


def test_a_comment_above_a_name_is_its_docstring() -> None:
    source = "import os\n\n#: how long\n#: it takes\nTIME = 3\nX = 1\n"
    assert reference.comment_above(source, 5) == "how long it takes"
    assert reference.comment_above(source, 6) == ""
