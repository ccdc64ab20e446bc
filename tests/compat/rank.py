"""What runs in a process of the pool: join torch.distributed once, then call one function after another."""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shoal  # noqa: F401  (registers the backend)
from shoal.testing.worker import attach, pickled

#: seconds that an operation may take; the pool's own limit comes first
TIMEOUT = datetime.timedelta(seconds=120)


@dataclass
class Context:
    """What a function on a rank gets as its first argument.

    Attributes:
        rank, size: as of the default group.
        backend: name of the default group's backend.
        group: the default group; None in a pool that was started with ``backend=None``.
        gloo: a group of the same ranks over Gloo, to compare with; None as above.
        store: the ranks' TCPStore; keys of other functions are in it too.
        scratch: an empty directory, the same one for all ranks and a new one for every call.
    """

    rank: int
    size: int
    backend: str | None
    group: Any
    gloo: Any
    store: Any
    scratch: Path


def serve(
    rank: int, size: int, backend: str | None, home: str, channel: Connection, dumps: Connection
) -> None:
    """Answer the pool's calls until it says ``None``.

    Args:
        rank, size: of the group.
        backend: of the default group; None: initialise nothing.
        home: directory for what the rank writes to its standard output and error, ``rank<n>.txt``.
        channel: takes ``(pickled (function, arguments), scratch directory)``, gives
            ``(kind, pickled value or exception, traceback, moment)``.
        dumps: takes the stacks of all threads as text, whenever ``DUMP_SIGNAL`` comes.
    """
    attach(dumps)
    output = os.open(Path(home, f"rank{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for theirs in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", theirs)  # torch deprecates what it still uses itself

    # Until torch 2.12 it warns of calls that say check_invariants= too.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")

    context = _join(rank, size, backend, channel)
    channel.send(("value", pickle.dumps(None), "", time.monotonic()))
    while (call := channel.recv()) is not None:
        payload, context.scratch = call
        try:
            function, args = pickle.loads(payload)
            report = ("value", pickle.dumps(function(context, *args)), "", time.monotonic())
        except BaseException as error:
            report = ("error", pickled(error), traceback.format_exc(), time.monotonic())
        channel.send(report)
        function = args = None
    if dist.is_initialized():
        # Gloo's threads end with the last reference to its groups, which must not be theirs.
        kept = (context.group, context.gloo)
        dist.destroy_process_group()
        del kept
    sys.stdout.flush()


def _join(rank: int, size: int, backend: str | None, channel: Connection) -> Context:
    store = dist.TCPStore(
        "127.0.0.1",
        channel.recv() if rank else 0,
        size,
        is_master=rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
    )
    if rank == 0:
        channel.send(store.port)
    group = gloo = None
    if backend is not None:
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=size, timeout=TIMEOUT
        )
        group = dist.group.WORLD
        gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return Context(rank, size, backend, group, gloo, store, Path())
