"""An acceptor and its port, for tests: a fixture to be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.net import Acceptor, listen

SECRET = b"secret"


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    with Acceptor(listen("127.0.0.1", secret=SECRET), secret=SECRET, purpose="test") as acceptor:
        yield acceptor


def port(acceptor: Acceptor) -> int:
    port: int = acceptor._listener.getsockname()[1]
    return port
