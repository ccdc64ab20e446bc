"""Commands that measure clean up however they end."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from shoal.tools.signals import cleaning_up, signals_deferred


def interrupted(*numbers: int) -> list[str]:
    """What is done in a block in which the signals come, and after it."""
    done = []
    try:
        with signals_deferred():
            for number in numbers:
                os.kill(os.getpid(), number)
            done.append("the block")
        done.append("what follows")
    except BaseException as error:
        done.append(repr(error))
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_after_what_is_undisturbed(number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup one is ignored
    try:
        with cleaning_up():
            assert interrupted(number) == ["the block", f"SystemExit({128 + number})"]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_ctrl_c_comes_after_what_is_undisturbed_and_what_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert interrupted(signal.SIGHUP) == ["the block", "what follows"]
        assert interrupted(signal.SIGHUP, signal.SIGINT) == ["the block", "KeyboardInterrupt()"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_installed_by_c_before_python_started_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    handler = ctypes.cast(libc.abs, ctypes.c_void_p).value  # does nothing when it is called
    before = signal.getsignal(signal.SIGHUP)
    getsignal = signal.getsignal
    # Python looks for such handlers when it starts.
    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == signal.SIGHUP else getsignal(n))
    try:
        libc.signal(signal.SIGHUP, handler)
        with cleaning_up(), signals_deferred():
            pass  # an error here must come before a signal does
        with cleaning_up():
            assert interrupted(signal.SIGHUP) == ["the block", "what follows"]
        assert libc.signal(signal.SIGHUP, handler) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
