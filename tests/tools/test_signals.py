"""Commands that measure clean up however they end."""

from __future__ import annotations

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
