"""The main function of a rank that is a process.  The fork server imports it, and torch with it, once."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..backend.registry import backend_factory
from ..initialize import init

#: asks a rank for its threads' stacks
DUMP_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1


def attach(dumps: Connection) -> None:
    """Let this process end with the one that runs the tests, and show its stacks when asked.

    Args:
        dumps: takes the stacks of all threads as text, whenever ``DUMP_SIGNAL`` comes.
    """
    gc.freeze()  # or a garbage collection looks at all of torch, and copies the pages that ranks share
    # The fork server ends with the process that runs the tests, and its ranks with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(DUMP_SIGNAL, file=dumps.fileno(), all_threads=True, chain=False)


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
    attach(dumps)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        fn, args, prepare = pickle.loads(payload)
        if prepare is not None:
            prepare()
        backend_factory(options["backend"])
        with init(**options) as group:
            value = fn(group, *args)
        group.world.close(group.timeout)
        report = ("value", pickle.dumps(value), "", time.monotonic())
    except BaseException as error:
        report = ("error", pickled(error), traceback.format_exc(), time.monotonic())
    reports.send(report)
    reports.close()


def pickled(error: BaseException) -> bytes:
    """The exception as bytes, b"" when it does not survive pickling."""
    try:
        raw = pickle.dumps(error)
        pickle.loads(raw)
    except Exception:
        return b""
    return raw
