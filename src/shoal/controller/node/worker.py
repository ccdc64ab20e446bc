"""The process of a node that a master starts (:mod:`shoal.controller.start.launching`).

Its standard input begins with the secret of the job in hexadecimal digits. It ends with its master: at the
end of a connection to it, or of the standard input.
"""

from __future__ import annotations

import contextlib
import os
import threading

import torch

from ... import config
from ...errors import ShoalError
from ...rendezvous.point import open_point
from ..protocol.naming import node_name, worker_name
from .serving import attend, end, ignore_interrupts, join, keep_modules


def main(index: int, url: str, threads: int) -> None:
    """Serve the master until it ends."""
    ignore_interrupts()
    keep_modules()
    secret = bytes.fromhex(os.read(0, 4096).decode())
    threading.Thread(target=_end_with_input, name="shoal-node-input", daemon=True).start()
    torch.set_num_threads(threads)
    seconds = config.TIMEOUT.get()
    with contextlib.suppress(ShoalError):  # if the master ends, the store and the connections end too
        place = open_point(url, secret=secret, timeout=seconds)
        attend(join(place, worker_name(node_name(index))), index, seconds)
    end()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    end()
