"""Delays on nodes: operators that sleep or are held, and sleeps between any two commands.

Nodes import this too.
"""

from __future__ import annotations

import random
import threading
import time

import torch

from shoal.controller.node.session_state import StreamProgress

_library = torch.library.Library("shoal_tests", "DEF")  # type: ignore[no-untyped-call]
_library.define("nap(Tensor x, float seconds) -> Tensor")  # type: ignore[no-untyped-call]


def _nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


_library.impl("nap", _nap, "CPU")  # type: ignore[no-untyped-call]
_library.impl("nap", lambda x, seconds: torch.empty_like(x), "Meta")  # type: ignore[no-untyped-call]

#: a copy of a tensor, after some seconds
nap = torch.ops.shoal_tests.nap.default

_library.define("held(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_let_go = threading.Semaphore(0)


def _held(x: torch.Tensor) -> torch.Tensor:
    _let_go.acquire()
    return x.clone()


_library.impl("held", _held, "CPU")  # type: ignore[no-untyped-call]
_library.impl("held", torch.empty_like, "Meta")  # type: ignore[no-untyped-call]

#: a copy of a tensor, once :func:`let_go` was called
held = torch.ops.shoal_tests.held.default


def let_go(session: str) -> None:
    """Called on a node: one ``held`` there goes on."""
    _let_go.release()


_reach = StreamProgress.reach


def know_naps(session: str) -> None:
    """Called on a node: this module is imported there then."""


def dawdle(session: str, seed: int, probability: float, seconds: float) -> None:
    """Sleep after some of the commands of all streams."""
    dice = random.Random(seed)

    def reach(progress: StreamProgress, position: int) -> None:
        _reach(progress, position)
        if dice.random() < probability:
            time.sleep(dice.random() * seconds)

    StreamProgress.reach = reach  # type: ignore[method-assign]


def hurry(session: str) -> None:
    """End :func:`dawdle`."""
    StreamProgress.reach = _reach  # type: ignore[method-assign]
