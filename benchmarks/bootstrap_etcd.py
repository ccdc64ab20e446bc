"""An etcd for ``bootstrap.py``, and ranks as threads that meet there."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import tempfile
import threading
import time

from bootstrap_ranks import PER_HOST, rendezvous_point

from shoal.common.process_identity import ProcessIdentity
from shoal.rendezvous.protocol import Rendezvous
from shoal.store import open_store

_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Exec etcd, which ends with the parent process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    print(ports[0], flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    clients, peers = (f"http://127.0.0.1:{port}" for port in ports)
    os.execvp(
        "etcd",
        ["etcd", "--data-dir", tempfile.mkdtemp(dir=os.environ["BOOTSTRAP_FOLDER"]),
         "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers,
         "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"],
    )  # fmt: skip


def meet(port: int, ranks: int, patience: float) -> float:
    """Let ``ranks`` threads meet in the etcd at ``port``; return the seconds until the last has finished."""
    me, ends, failures = ProcessIdentity.current(), [0.0] * ranks, []
    url = f"etcd://127.0.0.1:{port}"
    open_store(url, secret=b"of the benchmark", timeout=patience).close()  # wait until it answers

    def rank(number: int) -> None:
        name = f"host {number // PER_HOST}"
        try:
            with open_store(url, secret=b"of the benchmark", timeout=patience) as store:
                Rendezvous(rendezvous_point(store, number, ranks, name, me, patience)).join()
                ends[number] = time.monotonic()
        except Exception as error:
            failures.append(f"rank {number}: {error!r}")

    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"{len(failures)} ranks failed, the first: {failures[0]}")
    return max(ends) - begin
