"""Programs on several ranks, told what ``shoal run`` tells them, in processes that have torch already.

Starting Python and importing torch takes a rank seconds; a fork of the fork server has both.  Programs that
use Gloo are not for this: a script that drops DistributedDataParallel last may hang at its end.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import sys
import threading
import time
from pathlib import Path

import torch

from shoal.launch.ranks.environment import Job, ReservedPort
from shoal.rendezvous import job_record
from shoal.store import TCPStoreServer
from shoal.testing.processes import fork_server
from tests.support import exit_handlers
from tests.support.quick_workers import nursery, start_at

#: seconds that a rank gets to write its stacks, once its time is up, and for each part of them
_DUMP_TIME, _PART_TIME = 10.0, 0.2


def run_program(
    script: Path, size: int, *arguments: str, folder: Path, timeout: float = 120.0, is_master: bool = False
) -> list[str]:
    """Run a program on ranks of this machine.

    Args:
        arguments: of its command line.
        folder: where it runs.
        timeout: seconds until all ranks must have ended.
        is_master: the program starts workers, which are forks here.

    Returns:
        What each rank wrote to its standard output and error.

    Raises:
        AssertionError: a rank did not end by itself and with exit code 0; with what each wrote, and with the
            stacks of all threads of those that had not ended in time.
    """
    job, port = Job(size), ReservedPort()
    outputs = [folder / f"rank{rank}.txt" for rank in range(size)]
    with TCPStoreServer(secret=job.secret.encode(), records=job_record(size, job.ident)).start() as server:
        variables = [job.variables(rank, server.url, str(port.number)) for rank in range(size)]
        workers = nursery() if is_master else None
        ranks = [
            fork_server().Process(target=_play, args=(script, arguments, workers, timeout, *told))
            for told in zip(variables, outputs, strict=True)
        ]
        try:
            for rank in ranks:
                rank.start()
            # Not before: the first rank of all waits until the fork server has loaded torch.
            deadline = time.monotonic() + timeout
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            codes = [rank.exitcode for rank in ranks]
            for code, output in zip(codes, outputs, strict=True):
                if code is None:
                    _await_stacks(output)
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
                rank.close()
            port.close()
    written = [output.read_text() for output in outputs]
    assert codes == [0] * size, "\n".join([f"exit codes {codes} (None: killed after {timeout} s)", *written])
    return written


def _await_stacks(output: Path) -> None:
    """Wait until a rank that is late has written where its threads are."""
    deadline, before = time.monotonic() + _DUMP_TIME, ""
    while time.monotonic() < deadline:
        time.sleep(_PART_TIME)
        text = output.read_text() if output.exists() else ""
        if text == before and "Timeout (" in text:
            return
        before = text


def _play(
    script: Path,
    arguments: tuple[str, ...],
    workers: str | None,
    timeout: float,
    variables: dict[str, str],
    output: Path,
) -> None:
    """Be one rank."""
    if workers is not None:
        start_at(workers)
    multiprocessing.set_start_method(None, force=True)  # the default again, not that of the fork server
    exit_handlers.restore()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.dump_traceback_later(timeout, file=2)
    os.chdir(output.parent)
    os.environ.update(variables)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        # A process of multiprocessing ends without what a program leaves to the end of Python.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
