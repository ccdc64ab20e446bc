"""The main functions of processes that are ranks or workers; the fork server imports them once."""

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
from typing import Any

import torch

from ..backend.registry import backend_factory
from ..initialize import init
from ..rpc import Agent, join
from .leaks import left_at

#: asks a rank for its threads' stacks
DUMP_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1


def attach(dumps: Connection) -> None:
    """Let this process end with the one that runs the tests, and show its stacks when asked.

    Args:
        dumps: takes the stacks of all threads as text, whenever ``DUMP_SIGNAL`` comes.
    """
    # What a rank starts, such as workers of a DataLoader, would else come from a fork server of its own.
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # or a garbage collection looks at all of torch, and copies the pages that ranks share
    # The fork server ends with the process that runs the tests, and its ranks with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _let_the_server_end()
    faulthandler.register(DUMP_SIGNAL, file=dumps.fileno(), all_threads=True, chain=False)


def _let_the_server_end() -> None:
    """Close this process's copy of the pipe by whose end the fork server notices that nobody needs it."""
    server: Any = forkserver._forkserver
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)


def run_rank(
    payload: bytes,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    reports: Connection,
    dumps: Connection,
) -> None:
    """Meet the others, call the function, and report what came of it.

    Args:
        payload: pickled function, its arguments, and what to call before (see ``Ranks``).
        environment: how to meet.
        options: of ``init``.
        reports: takes one tuple ``(kind, pickled value or exception, traceback, moment)``.
        dumps: takes the stacks of all threads as text, whenever ``DUMP_SIGNAL`` comes.
    """

    def work(fn: Any, args: tuple[Any, ...]) -> Any:
        backend_factory(options["backend"])
        with init(**options) as group:
            value = fn(group, *args)
            # The test decides what counts as a failure: the end of the block raises nothing then.
            group.world.close(group.timeout)
        return value

    _run(payload, environment, reports, dumps, work)


def run_newcomer(
    payload: bytes, environment: Mapping[str, str], reports: Connection, dumps: Connection
) -> None:
    """Call a function that joins a session; for the arguments see :func:`run_rank`."""
    _run(payload, environment, reports, dumps, lambda fn, args: fn(*args))


def _run(
    payload: bytes,
    environment: Mapping[str, str],
    reports: Connection,
    dumps: Connection,
    work: Callable[[Any, tuple[Any, ...]], Any],
) -> None:
    attach(dumps)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        fn, args, prepare = pickle.loads(payload)
        if prepare is not None:
            prepare()
        value = work(fn, args)
        report = ("value", pickle.dumps(value), "", time.monotonic())
    except BaseException as error:
        report = ("error", pickled(error), traceback.format_exc(), time.monotonic())
    reports.send(report)
    reports.close()


def run_worker(
    name: str,
    payload: bytes,
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
    orders: Connection,
    reports: Connection,
    dumps: Connection,
) -> None:
    """Join the other workers, call the function, report what came of it, and serve until told to leave.

    Args:
        name: of the worker.
        payload, environment, reports, dumps: as for :func:`run_rank`; without a function there is no report.
        settings: of ``shoal.rpc.join``.
        orders: see :func:`_obey`.
    """
    attach(dumps)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        fn, args, prepare = pickle.loads(payload)
        if prepare is not None:
            prepare()
        with join(name, **settings) as agent:
            leaving = threading.Event()
            threading.Thread(target=_obey, args=(agent, orders, leaving), daemon=True).start()
            if fn is not None:
                reports.send(("value", pickle.dumps(fn(agent, *args)), "", time.monotonic()))
            leaving.wait()
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody waits any more
            reports.send(("error", pickled(error), traceback.format_exc(), time.monotonic()))
        raise SystemExit(1) from None


def _obey(agent: Agent, orders: Connection, leaving: threading.Event) -> None:
    """Do what the test's process asks for: tell what is left of calls and objects, or leave."""
    with contextlib.suppress(EOFError, OSError):
        while orders.recv() != "leave":
            orders.send(sorted(left_at(agent)))
    leaving.set()


def pickled(error: BaseException) -> bytes:
    """The exception as bytes, b"" when it does not survive pickling."""
    try:
        raw = pickle.dumps(error)
        pickle.loads(raw)
    except Exception:
        return b""
    return raw
