"""Playing another user of the machine, which takes root."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from typing import TypeVar

import pytest

from shoal.net import build_version

T = TypeVar("T")

#: "nobody" on most systems; any user without rights will do
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


def as_nobody(fn: Callable[[], T]) -> T | BaseException:
    """What ``fn`` returned or raised in a forked process of user :data:`NOBODY`.

    Import beforehand what it needs: that user may have no way to the sources.
    """
    build_version()  # it and the codec are imported when they are used first
    "localhost".encode("idna")
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                outcome: object = fn()
            except BaseException as error:
                outcome = error
            with os.fdopen(writable, "wb") as pipe:
                pickle.dump(outcome, pipe)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        outcome = pickle.load(pipe)
    os.waitpid(pid, 0)
    return outcome  # type: ignore[no-any-return]
