"""Values whose containers are unusual, and whose code raises: they arrive, or the caller gets an error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.errors import RemoteError
from shoal.rpc import Agent
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE


class Unread(Mapping[str, Any]):
    """A mapping that raises when it is read, and that contains itself."""

    def __init__(self) -> None:
        self.inside = self

    def __getitem__(self, key: str) -> Any:
        raise LookupError("it was read")

    __iter__ = __len__ = __getitem__  # type: ignore[assignment]


def test_an_object_is_made_whatever_is_in_it(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE)
    made = a.peer("b").remote(Unread).to_here()
    assert made.inside is made


def test_a_value_that_contains_itself_goes_there_and_back(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE)
    value: dict[str, Any] = {}
    value["self"] = [value]
    back = a.peer("b").call(handlers.echo, value).wait()
    assert back["self"][0] is back
    there = a.peer("b").remote(handlers.echo, value).to_here()
    assert there["self"][0] is there


class Unsendable(Exception):
    """An exception that raises another one, of a kind that passes `except Exception`, when it is pickled."""

    def __reduce__(self) -> Any:
        raise asyncio.CancelledError


def refuse() -> None:
    raise Unsendable("refused")


def test_an_exception_that_cannot_be_pickled_is_reported(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE, handlers=1)
    for _ in range(2):
        with pytest.raises(RemoteError, match="Unsendable: refused"):
            a.peer("b").call(refuse).wait()
        with pytest.raises(RemoteError, match="CancelledError"):
            a.peer("b").call(Unsendable).wait()
