"""Main functions of rank and worker processes, imported once by the fork server."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch

from ..backend.registry import backend_factory
from ..initialize import init
from ..rpc import Agent, join
from .leaks import left_at

#: requests the stacks of all threads
DUMP_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
#: kind, pickled value or exception, traceback, time
Report: TypeAlias = tuple[str, bytes, str, float]


def attach(dumps: Connection) -> None:
    """Make this process end with the test process, and write its stacks to `dumps` at ``DUMP_SIGNAL``."""
    # Otherwise processes that a rank starts, such as DataLoader workers, would use another fork server.
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # otherwise garbage collections would scan torch and unshare its memory pages
    # The fork server ends with the test process, and its ranks with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _close_server_pipe()
    faulthandler.register(DUMP_SIGNAL, file=dumps.fileno(), all_threads=True, chain=False)


def _close_server_pipe() -> None:
    """Close our copy of the pipe through which the fork server detects that it is no longer needed."""
    server: Any = forkserver._forkserver
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)


def run_rank(
    payload: bytes,
    environment: Mapping[str, str],
    options: Mapping[str, Any] | None,
    reports: Connection,
    dumps: Connection,
) -> None:
    """Call the function as :func:`call`, and report the result.

    Args:
        payload: the pickled function, its arguments, and ``prepare`` (see ``Ranks``).
        environment: variables for the rendezvous.
        reports: receives one tuple ``(kind, pickled value or exception, traceback, time)``.
        dumps: receives the stacks of all threads as text at each ``DUMP_SIGNAL``.
    """
    attach(dumps)
    try:
        report = call(*_unpickled(payload, environment), options)
    except BaseException as error:
        report = reported_error(error)
    reports.send(report)
    reports.close()


def call(fn: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any] | None) -> Report:
    """Call ``fn(group, *args)`` with the group that ``init(**options)`` returns; close it; return the report.

    If the function raises, the group is aborted.  Without ``options``, call ``fn(*args)``.
    """
    raised = None
    try:
        if options is None:
            return reported_value(fn(*args))
        backend_factory(options["backend"])
        with init(**options) as group:
            try:
                value = fn(group, *args)
            except BaseException:
                # Taken before the group is aborted, so that the failures of the others are later.
                raised = time.monotonic()
                raise
            # The test decides what is a failure, so close here without raising.
            group.world.close(group.timeout)
        return reported_value(value)
    except BaseException as error:
        return reported_error(error, raised)


def _unpickled(payload: bytes, environment: Mapping[str, str]) -> tuple[Any, tuple[Any, ...]]:
    """Prepare this process; return its function and the arguments."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    fn, args, prepare = pickle.loads(payload)
    if prepare is not None:
        prepare()
    return fn, args


def reported_value(value: object) -> Report:
    """Return the report of a function that returned ``value``."""
    return "value", pickle.dumps(value), "", time.monotonic()


def reported_error(error: BaseException, at: float | None = None) -> Report:
    """Return the report of a function that raised the exception that is being handled.

    Args:
        at: the time at which it was raised; None: now.
    """
    return "error", pickled(error), traceback.format_exc(), time.monotonic() if at is None else at


def run_worker(
    name: str,
    payload: bytes,
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
    control: Connection,
    reports: Connection,
    dumps: Connection,
) -> None:
    """Join the other workers, call the function, report the result, and serve until ordered to leave.

    Args:
        name: name of the worker.
        payload, environment, reports, dumps: as for :func:`run_rank`; no report without a function.
        settings: arguments of ``shoal.rpc.join``.
        control: see :func:`_serve_control`.
    """
    attach(dumps)
    try:
        fn, args = _unpickled(payload, environment)
        with join(name, **settings) as agent:
            leaving = threading.Event()
            threading.Thread(target=_serve_control, args=(agent, control, leaving), daemon=True).start()
            if fn is not None:
                reports.send(reported_value(fn(agent, *args)))
            leaving.wait()
    except BaseException as error:
        with contextlib.suppress(OSError):  # the test's process no longer reads
            reports.send(reported_error(error))
        raise SystemExit(1) from None


def _serve_control(agent: Agent, control: Connection, leaving: threading.Event) -> None:
    """Execute the orders of the test's process: report leaks, or leave."""
    with contextlib.suppress(EOFError, OSError):
        while control.recv() != "leave":
            control.send(sorted(left_at(agent)))
    leaving.set()


def pickled(error: BaseException) -> bytes:
    """Pickle the exception; return b"" if it does not survive pickling."""
    try:
        raw = pickle.dumps(error)
        pickle.loads(raw)
    except Exception:
        return b""
    return raw
