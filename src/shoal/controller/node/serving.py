"""The main loop of a node's process: it joins the master and serves it until the master ends.

A process that a master starts (:mod:`shoal.controller.start.processes`) ends with its master: at the end of a
connection to it, or of the standard input, which begins with the secret of the job in hexadecimal digits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from ... import config, failure_report, rpc
from ...common.formatting import format_seconds
from ...common.mpi_library import finalize, mark_broken
from ...errors import (
    AuthenticationError,
    RendezvousTimeout,
    ShoalError,
    StoreError,
    UnknownWorker,
    VersionMismatch,
    WireError,
    WorkerLost,
)
from ...net import Deadline
from ...rendezvous.point import RendezvousPoint, open_point
from ...rpc.join import HANDLERS, checked_settings, join_at
from ..protocol.workers import MASTER, join_master, node_name, worker_name
from . import sessions

logger = logging.getLogger(__name__)

#: seconds to close the agent after the master has ended
CLOSE_TIMEOUT_S = 5.0
#: seconds to check whether the master still exists
MASTER_CHECK_TIMEOUT_S = 2.0
#: seconds between two attempts to connect to a missing store
RETRY_DELAY_S = 0.1
#: seconds of one wait of a worker for a master
MASTER_WAIT_S = 3600.0


def join(place: RendezvousPoint, name: str) -> rpc.Agent:
    """Join as a worker at an open rendezvous point, which the agent closes when it closes."""
    try:
        return join_at(place, name, checked_settings(None, None, HANDLERS))
    except BaseException:
        place.close()
        raise


def serve_master(agent: rpc.Agent, index: int | None, timeout_s: float) -> bool:
    """Serve the master until a connection to it ends, then end its sessions; return whether it was served.

    Args:
        index: index of the node to become; None: chosen by the master.
        timeout_s: seconds to wait for the master.

    Raises:
        UnknownWorker: the master did not appear in time.
    """
    over = threading.Event()
    # A broken connection also ends it: the master treats it as the loss of this worker.
    agent.on_connection_lost(lambda name: over.set() if name == MASTER else None)
    master = agent.peer(MASTER, timeout=timeout_s)
    there, served = agent.directory.look(MASTER), False
    asked = _dump_when_asked(agent)
    try:
        master.call(join_master, index, os.getpid()).wait()
        served = True
        over.wait()
    except WorkerLost:
        served = sessions.begun()  # else the master failed before it added this worker
    finally:
        sessions.end_all()
        if asked:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        agent.check_reachable(MASTER, MASTER_CHECK_TIMEOUT_S)
    except WorkerLost:  # frees its name for the next master; on other machines nobody else can
        mark_broken()
        if there is not None:
            agent.directory.withdraw(there)
    except ShoalError:
        pass  # it left, or there is no store
    return served


def serve_process(index: int, url: str, threads: int) -> NoReturn:
    """Serve as node `index` in a process that the master has started, and exit when the master ends."""
    ignore_interrupts()
    freeze_modules()
    secret = bytes.fromhex(os.read(0, 4096).decode())
    threading.Thread(target=_exit_with_input, name="shoal-node-input", daemon=True).start()
    torch.set_num_threads(threads)
    seconds = config.TIMEOUT.get()
    with contextlib.suppress(ShoalError):  # if the master ends, the store and the connections end too
        place = open_point(url, secret=secret, timeout=seconds)
        serve_master(join(place, worker_name(node_name(index))), index, seconds)
    exit_now()


def _exit_with_input() -> None:
    while os.read(0, 4096):
        pass
    exit_now()


def serve_rank(place: RendezvousPoint, rank: int, timeout: float) -> NoReturn:
    """Serve as the node of a launcher's rank, and exit when the master ends.

    Raises `RendezvousTimeout` if rank 0 does not become the master.
    """
    ignore_interrupts()
    freeze_modules()
    agent = join(place, worker_name(node_name(rank - 1)))
    try:
        serve_master(agent, rank - 1, timeout)
    except UnknownWorker:
        raise RendezvousTimeout(
            f"rank {rank}: rank 0 has not called shoal.init_master_worker within {format_seconds(timeout)}"
        ) from None
    finally:
        failure_report.left()
        agent.close(CLOSE_TIMEOUT_S, graceful=False)
    if agent.executor.thread_count():
        finalize()
        exit_now()  # without waiting for running handlers
    raise SystemExit(0)


def serve_masters(url: str, name: str, report: Callable[[str], None]) -> None:
    """Serve the masters at a URL, one after another, until there is no store for ``SHOAL_TIMEOUT`` seconds.

    Args:
        url: URL of the rendezvous point.
        name: prefix of this worker's names.
        report: called with texts for the user.

    Raises:
        ShoalError: there was no store within ``SHOAL_TIMEOUT`` seconds, or it rejected this worker.
    """
    freeze_modules()
    seconds = config.TIMEOUT.get()
    report(f"waits for a master at {url}")
    served, gone = False, Deadline(seconds)
    while True:
        try:
            agent = join(open_point(url, timeout=seconds), worker_name(name))
        except (AuthenticationError, VersionMismatch):
            raise
        except (RendezvousTimeout, StoreError, WireError):
            if not served:
                raise
            if gone.expired:
                report(f"ends, because there was no store at {url} for {format_seconds(seconds)}")
                return
            time.sleep(RETRY_DELAY_S)  # its master, which served it, just ended
            continue
        try:
            # Keep trying if no master appears, or if the store ends with its master.
            with contextlib.suppress(UnknownWorker, StoreError, WireError):
                if serve_master(agent, None, MASTER_WAIT_S):
                    report("waits for another master")
        finally:
            agent.close(CLOSE_TIMEOUT_S, graceful=False)
        served, gone = True, Deadline(seconds)


def _dump_when_asked(agent: rpc.Agent) -> bool:
    """Write a dump at each SIGUSR1 unless the signal has another handler; return True if installed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    ):
        return False

    def dump(*_: object) -> None:
        try:
            path = agent.dump()
        except Exception as why:  # e.g. a full disk, which must not end the node
            logger.warning("worker %r cannot write a dump: %s", agent.name, why)
        else:
            logger.warning("worker %r wrote a dump to %s", agent.name, path)

    signal.signal(signal.SIGUSR1, dump)
    return True


def ignore_interrupts() -> None:
    """Ignore Ctrl-C: it interrupts the master, not its nodes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def freeze_modules() -> None:
    """Exclude loaded modules from garbage collections, which run between operations."""
    gc.freeze()
    atexit.register(_unfreeze_for_triton)


def _unfreeze_for_triton() -> None:
    """Unfreeze modules at exit if triton is loaded: triton 3.9 reports remaining objects as leaks.

    Without triton this would only delay the exit.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def exit_now() -> NoReturn:
    """Exit now, without exit handlers and without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the reader may have ended
            stream.flush()
    os._exit(0)
