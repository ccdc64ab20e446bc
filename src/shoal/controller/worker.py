"""The process of a node: ``python -m shoal.controller.worker NAME URL THREADS``, started by a master.

It ends with its master: when the connection to it ends, or, before there is one, its standard input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import torch

from .. import rpc
from ..errors import ShoalError
from .naming import MASTER


def main(name: str, url: str, threads: int) -> None:
    """Serve the master until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C ends what the master waits for, not its nodes
    threading.Thread(target=_end_with_input, name="shoal-node-input", daemon=True).start()
    torch.set_num_threads(threads)
    with contextlib.suppress(ShoalError):  # without its master the worker has neither store nor connection
        rpc.join(name, url=url).serve(until=MASTER)
    _end()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    _end()


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever a handler still does: nobody waits for it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
