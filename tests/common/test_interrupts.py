"""Ctrl-C in code that must not be interrupted."""

from __future__ import annotations

import signal
import threading

import pytest

from shoal.common.interrupts import defer_sigint


def test_a_ctrl_c_is_handled_after_the_call() -> None:
    steps: list[int] = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        steps.append(1)
        signal.raise_signal(signal.SIGINT)
        steps.append(2)

    with pytest.raises(KeyboardInterrupt):
        defer_sigint(work)
    assert steps == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_exception_of_the_call_keeps_the_handler() -> None:
    def handler(number: int, frame: object) -> None:
        handled.append(number)

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the call")

    handled: list[int] = []
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(ValueError, match="of the call"):
            defer_sigint(work)
        assert handled == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_only_call() -> None:
    called: list[bool] = []
    thread = threading.Thread(target=lambda: defer_sigint(lambda: called.append(True)))
    thread.start()
    thread.join()
    assert called == [True]
