"""Ctrl-C while a process is a master: it ends neither the process, nor a node, nor what was issued."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.controller.commands import interrupts
from shoal.controller.tensor.autograd import DeviceGuard
from shoal.controller.tensor.tensor import TensorHandle
from tests.controller import interrupted
from tests.controller.nodes import BACKSTOP, Program, programs

start = pytest.fixture(programs)
Start = Callable[..., Program]

#: presses Ctrl-C, at which nobody has looked when it returns
pressed = ctypes.PYFUNCTYPE(None)(("PyErr_SetInterrupt", ctypes.pythonapi))
#: calls each of a list, between which Python has no bytecode of its own to look for signals at
in_c = partial(map, operator.methodcaller("__call__"))


def wait() -> None:
    """Wait in short calls of C: a Ctrl-C just before one begins is handled when it ends."""
    end = time.monotonic() + BACKSTOP
    while time.monotonic() < end:
        time.sleep(0.01)


def wait_for_a_ctrl_c() -> None:
    """Wait until one ends the wait."""
    with pytest.raises(KeyboardInterrupt):
        wait()


@pytest.fixture
def protected(no_master: None) -> Iterator[None]:
    interrupts.protect()
    yield
    interrupts.unprotect()


@pytest.mark.usefixtures("protected")
def test_a_ctrl_c_in_the_cpp_of_torch_comes_again_outside_of_it() -> None:
    guard = DeviceGuard()
    asked = partial(torch._C._acc.DeviceGuard.type_, guard)  # C++, which looks for the method of Python
    told: list[Any] = []
    with contextlib.suppress(KeyboardInterrupt):  # it may come again while this is left
        told.extend(in_c([pressed, asked]))
        wait_for_a_ctrl_c()
    assert told[1] == torch._C._autograd.DeviceType.PrivateUse1


@pytest.mark.usefixtures("protected")
def test_a_ctrl_c_comes_at_once_where_torch_has_no_part_in_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(in_c([pressed, partial(str, os)]))


@interrupts.defer_interrupt
def _makes_an_effort(done: list[str], fn: Callable[[], Any]) -> None:
    pressed()
    fn()
    done.append("all")


@interrupts.interruptible
def _waits() -> None:
    wait()


@pytest.mark.usefixtures("protected")
def test_a_ctrl_c_waits_for_the_end_of_what_must_not_be_cut_off_unless_that_waits_itself() -> None:
    done: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        _makes_an_effort(done, partial(time.sleep, 0.005))
        wait_for_a_ctrl_c()
    assert done == ["all"]
    with pytest.raises(KeyboardInterrupt):
        _makes_an_effort(done, _waits)
    assert done == ["all"]


@pytest.mark.usefixtures("protected")
def test_a_handle_that_is_interrupted_frees_its_tensor() -> None:
    space = SimpleNamespace(freed=[], ordering=None)
    handle: Any = TensorHandle(space, 7, None)  # type: ignore[arg-type]
    holders = [handle]
    del handle
    with contextlib.suppress(KeyboardInterrupt):
        list(in_c([pressed, holders.clear]))
        wait_for_a_ctrl_c()
    assert space.freed == [7]


@pytest.mark.usefixtures("no_master")
def test_the_handler_of_a_program_is_called_and_is_there_again_afterwards() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    own = signal.getsignal(signal.SIGINT)
    try:
        interrupts.protect()
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.unprotect()
        assert called == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_master")
def test_a_handler_that_a_program_sets_later_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    called: list[int] = []
    try:
        interrupts.protect()
        signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
        own = signal.getsignal(signal.SIGINT)
        interrupts.call_without_interrupt(partial(os.kill, os.getpid(), signal.SIGINT))
        assert called == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
        interrupts.unprotect()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_master")
def test_each_cell_of_a_notebook_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Callable[..., None]] = {}
    events = SimpleNamespace(register=registered.__setitem__, unregister=lambda name, _: registered.pop(name))
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(events=events))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    usual = signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is usual
    interrupts.protect()
    for again in (partial(registered["pre_run_cell"], None), partial(interrupts.call_without_interrupt, int)):
        signal.signal(signal.SIGINT, usual)  # as kernels do before each cell
        again()
        assert signal.getsignal(signal.SIGINT) is not usual
    interrupts.unprotect()
    assert not registered
    assert signal.getsignal(signal.SIGINT) is usual


@pytest.mark.usefixtures("protected")
def test_a_fork_has_no_part_in_a_ctrl_c_that_is_to_come_again_and_is_protected_itself() -> None:
    def in_a_child() -> None:
        status = 1
        try:
            time.sleep(0.01)  # nothing comes
            done: list[str] = []
            with contextlib.suppress(KeyboardInterrupt):
                _makes_an_effort(done, partial(time.sleep, 0.005))
                wait_for_a_ctrl_c()
            status = done != ["all"]
        finally:
            os._exit(status)

    @interrupts.defer_interrupt
    def forked() -> int:
        pressed()
        return os.fork()

    children: list[int] = []
    with contextlib.suppress(KeyboardInterrupt):
        children.extend(in_c([forked]))
        if not children[0]:
            in_a_child()
        wait_for_a_ctrl_c()
    assert os.waitpid(children[0], 0)[1] == 0


KINDS = sorted(interrupted.STEPS)


def test_a_ctrl_c_at_any_moment_ends_a_step_and_nothing_else(start: Start) -> None:
    program = start(interrupted.is_interrupted, KINDS, 10)
    assert {kind: program.told() for kind in KINDS} == dict.fromkeys(KINDS, "as before")
    assert program.told() == "done"
    assert program.ended() == 0


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_ctrl_cs_end_steps_and_nothing_else(start: Start, kind: str) -> None:
    program = start(interrupted.is_interrupted, [kind] * 20, 50)  # it tells after every fifty
    assert [program.told() for _ in range(21)] == ["as before"] * 20 + ["done"]
    assert program.ended() == 0
