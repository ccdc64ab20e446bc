"""Ranks as processes: results, failures, signals, deadlines.  One fork server serves all tests."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import pytest
import torch

from shoal import ProcessGroup, RemoteError, UsageError
from shoal.testing import no_leaks, processes, run_processes
from shoal.testing.faults import cut
from tests.support.store_backend import use_store_backend

HOW = {"backend": "store", "prepare": use_store_backend, "timeout": 30.0}


def add(group: ProcessGroup, amount: int) -> tuple[int, float]:
    x = torch.full((3,), float(group.rank + amount))
    return os.getpid(), group.all_reduce(x).wait().sum().item()


def fail(group: ProcessGroup) -> None:
    if group.rank == 1:
        raise KeyError("a bad day")
    if group.rank == 2:
        os._exit(7)


def say_ready(group: ProcessGroup) -> str:
    group.store.set(f"ready/{group.rank}", b"")
    group.store.wait(["go"])
    return "went on"


def hang(group: ProcessGroup) -> None:
    group.store.set(f"ready/{group.rank}", b"")
    threading.Event().wait()


def return_what_cannot_be_pickled(group: ProcessGroup) -> object:
    return threading.Lock()


def test_results_come_in_rank_order_from_processes_of_their_own() -> None:
    with no_leaks():
        results = run_processes(add, 3, 1, **HOW)
    pids = {pid for pid, _ in results}
    assert len(pids | {os.getpid()}) == 4
    assert [value for _, value in results] == [18.0] * 3


def test_every_failure_is_shown() -> None:
    with pytest.raises(RemoteError) as caught:
        run_processes(fail, 3, **HOW)
    text = str(caught.value)
    assert "KeyError: 'a bad day'" in text
    assert "rank 2 exited with code 7" in text


def test_an_outcome_tells_what_became_of_a_rank() -> None:
    with no_leaks(), processes(say_ready, 3, **HOW) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)])
        ranks.kill(1)
        ranks.stop(2)
        ranks.resume(2)
        ranks.store.set("go", b"")
        outcomes = ranks.join()
    assert [outcome.ok for outcome in outcomes] == [True, False, True]
    assert outcomes[0].value == "went on"
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "SIGKILL" in outcomes[1].describe()


def test_a_delayed_rank_goes_on_by_itself() -> None:
    with processes(say_ready, 2, **HOW) as ranks:
        ranks.store.wait(["ready/0", "ready/1"])
        ranks.delay(0, 0.05)
        ranks.store.set("go", b"")
        assert all(outcome.ok for outcome in ranks.join())


def test_the_deadline_shows_every_rank_and_kills_it() -> None:
    with no_leaks(), processes(hang, 2, **{**HOW, "timeout": 1.0, "op_timeout": 30.0}) as ranks:
        ranks.store.wait(["ready/0", "ready/1"], 30.0)
        ranks.stop(1)
        outcomes = ranks.join()
    assert "in hang" in (outcomes[0].stacks or "")
    assert "it is stopped" in (outcomes[1].stacks or "")


def test_whoever_runs_at_the_end_of_the_block_is_killed() -> None:
    with no_leaks(), processes(hang, 2, **HOW):
        pass


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    with pytest.raises(RemoteError, match="cannot pickle"):
        run_processes(return_what_cannot_be_pickled, 1, **HOW)


def test_an_inner_function_is_refused() -> None:
    with pytest.raises(UsageError, match="top level of a module"):
        run_processes(lambda group: None, 1)


def test_a_cut_connection_ends_on_both_sides() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        assert cut(os.getpid(), os.getpid()) >= 1
        assert client.recv(1) == b""
        assert server.recv(1) == b""


def connect_to_parent(group: ProcessGroup, port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"x")
        return sock.recv(1)


def accept(listener: socket.socket) -> socket.socket:
    """The connection of the rank; another program may look for a server that had the port before."""
    while True:
        server, _ = listener.accept()
        server.settimeout(20)
        if server.recv(1) == b"x":
            return server
        server.close()


def test_a_connection_of_another_process_can_be_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        with (
            processes(connect_to_parent, 1, listener.getsockname()[1], **HOW) as ranks,
            accept(listener) as server,
        ):
            assert cut(ranks.pids[0], os.getpid()) >= 1
            assert server.recv(1) == b""
            ranks.join()


def raise_in_main(group: ProcessGroup) -> None:
    sys.exit(3)


def test_exit_is_reported() -> None:
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        run_processes(raise_in_main, 1, **HOW)
