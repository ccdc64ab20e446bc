"""Handlers of ``atexit`` in children of the fork server."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref


def restore() -> None:
    """Register the handlers again that modules registered in the fork server.

    From Python 3.13 on a process of multiprocessing begins without the handlers of its parent.  A program
    that runs in such a process leaves its groups open, and a thread that waits in the core aborts it.
    """
    if sys.version_info < (3, 13):
        return
    from shoal.compat.reconfigure.process_group import _end_attempts
    from shoal.future.pool import _end as end_callbacks
    from shoal.rpc.agent import _close_at_exit as close_agents
    from shoal.world import _close_at_exit as close_worlds

    finalizers = weakref.finalize._exitfunc  # type: ignore[attr-defined]
    for handler in (logging.shutdown, finalizers, end_callbacks, close_worlds, close_agents, _end_attempts):
        atexit.unregister(handler)  # of a module that was imported in this process
        atexit.register(handler)
