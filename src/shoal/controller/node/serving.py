"""A process as a node: it comes to the master, and serves it until that ends."""

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

from ... import config, failure_report, rpc
from ...common.wording import in_seconds
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
from ...rendezvous.place import RendezvousPoint, open_place
from ...rpc.join import HANDLERS, at_place, checked_settings
from ..protocol.joining import arrive
from ..protocol.naming import MASTER, node_name, worker_name
from . import sessions

logger = logging.getLogger(__name__)

#: seconds for leaving a master that has ended
_END = 5.0
#: seconds for a look at whether a master is still there
_LOOK = 2.0
#: seconds until a store that has gone is looked for again
_PAUSE = 0.1
#: seconds that a worker waits at a time for a master that has not come
_LONG = 3600.0


def join(place: RendezvousPoint, name: str) -> rpc.Agent:
    """A worker at an open place, which it closes at its end."""
    try:
        return at_place(place, name, checked_settings(None, None, HANDLERS))
    except BaseException:
        place.close()
        raise


def attend(agent: rpc.Agent, index: int | None, patience: float) -> bool:
    """Serve the master until a connection to it ends, and let go of what it had here; whether it was there.

    Args:
        index: of the node that this worker is to be; None: as the master says.
        patience: seconds for the master to come.

    Raises:
        UnknownWorker: it did not come in time.
    """
    over = threading.Event()
    # A broken connection is the end too: the master takes it for this worker's death.
    agent.on_lost(lambda name: over.set() if name == MASTER else None)
    master = agent.peer(MASTER, timeout=patience)
    there, served = agent.directory.look(MASTER), False
    asked = _dump_when_asked(agent)
    try:
        master.call(arrive, index, os.getpid()).wait()
        served = True
        over.wait()
    except WorkerLost:
        served = sessions.begun()  # or it died before it could say that this worker has come
    finally:
        sessions.end_all()
        if asked:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        agent.reach(MASTER, _LOOK)
    except WorkerLost:  # on another machine nobody else knows, and another master could not have the name
        if there is not None:
            agent.directory.withdraw(there)
    except ShoalError:
        pass  # it has left, or the store is gone
    return served


def serve_rank(place: RendezvousPoint, rank: int, timeout: float) -> NoReturn:
    """Be the node of a rank that a launcher has started, and end this process with the master.

    Raises:
        RendezvousTimeout: rank 0 does not become the master.
    """
    ignore_interrupts()
    keep_modules()
    agent = join(place, worker_name(node_name(rank - 1)))
    try:
        attend(agent, rank - 1, timeout)
    except UnknownWorker:
        raise RendezvousTimeout(
            f"rank {rank}: rank 0 has not called shoal.init_master_worker within {in_seconds(timeout)}"
        ) from None
    finally:
        failure_report.left()
        agent.close(_END, graceful=False)
    if agent.executor.thread_count():
        end()  # nobody waits for what a handler still does
    raise SystemExit(0)


def serve_masters(url: str, name: str, say: Callable[[str], None]) -> None:
    """Serve the masters that come to a place, one after another, until the place is gone.

    Args:
        url: of the place.
        name: that the names of this worker begin with.
        say: told in words what happens.

    Raises:
        ShoalError: the place was not there within ``SHOAL_TIMEOUT`` seconds, or does not let this worker in.
    """
    keep_modules()
    seconds = config.TIMEOUT.get()
    say(f"waits for a master at {url}")
    served, gone = False, Deadline(seconds)
    while True:
        try:
            agent = join(open_place(url, timeout=seconds), worker_name(name))
        except (AuthenticationError, VersionMismatch):
            raise
        except (RendezvousTimeout, StoreError, WireError):
            if not served:
                raise
            if gone.expired:
                say(f"ends, because there was no store at {url} for {in_seconds(seconds)}")
                return
            time.sleep(_PAUSE)  # it went with its master just now
            continue
        try:
            # Neither a master that does not come nor a store that goes with its master is an end.
            with contextlib.suppress(UnknownWorker, StoreError, WireError):
                if attend(agent, None, _LONG):
                    say("waits for another master")
        finally:
            agent.close(_END, graceful=False)
        served, gone = True, Deadline(seconds)


def _dump_when_asked(agent: rpc.Agent) -> bool:
    """Write a dump at each SIGUSR1, unless the program does something else then; whether it does not."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    ):
        return False

    def dump(*_: object) -> None:
        try:
            path = agent.dump()
        except Exception as why:  # a full disk is no end of a node
            logger.warning("worker %r cannot write a dump: %s", agent.name, why)
        else:
            logger.warning("worker %r wrote what it does to %s", agent.name, path)

    signal.signal(signal.SIGUSR1, dump)
    return True


def ignore_interrupts() -> None:
    """A Ctrl-C ends what the master waits for, and not its nodes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def keep_modules() -> None:
    """Keep garbage collections, which come amid the operations, from walking over all loaded modules."""
    gc.freeze()
    atexit.register(_show_modules_to_triton)


def _show_modules_to_triton() -> None:
    """Let modules be collected at the end of the process where triton is loaded.

    triton 3.9 reports what is left then as leaks.  Elsewhere it would only make the end slower.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def end() -> NoReturn:
    """End this process now, whatever its handlers do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # nobody reads it any more
            stream.flush()
    os._exit(0)
