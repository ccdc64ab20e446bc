"""A program waits for a node that is too far behind: commands and bytes ahead of it are bounded."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shoal.controller import Master
from shoal.controller.commands import connection
from tests.controller.nodes import BACKSTOP, stop

#: commands between two looks at a line
LOOK = 32


@contextlib.contextmanager
def stopped(master: Master, node: int) -> Iterator[None]:
    """The node does nothing meanwhile, as if its work took for ever."""
    stop(master.pids[node])
    try:
        yield
    finally:
        os.kill(master.pids[node], signal.SIGCONT)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + BACKSTOP
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def in_thread(program: Callable[[], None]) -> Iterator[threading.Thread]:
    """The program runs meanwhile, and has ended well afterwards."""
    ended: list[bool] = []

    def run() -> None:
        program()
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(BACKSTOP)
    assert ended


def test_a_program_waits_for_the_slow_node_of_a_place_and_the_fast_one_does_all_that_was_issued(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_COMMANDS", 500)
    place = master.place([0, 1])
    counted = torch.zeros(2, device=place.device)
    master.synchronize()
    slow, fast = master._nodes[0], master._nodes[1]
    issued, most = 0, 0

    def count() -> None:
        nonlocal issued, most
        for _ in range(3000):
            counted.add_(1)
            issued += 1
            most = max(most, slow.pending)

    with stopped(master, 0), in_thread(count) as counting:
        until(lambda: slow.pending >= 500 and not fast.streams[0].waiting)
        until(lambda: all(batch.future.done() for batch in list(fast.streams[0].batches)))
        assert counting.is_alive()
        assert 500 - LOOK <= issued < 600
        os.kill(master.pids[0], signal.SIGCONT)
    assert most < 500 + LOOK
    assert [part.tolist() for part in place.gather(counted)] == [[3000.0] * 2] * 2


def test_tensors_of_the_master_wait_when_too_many_bytes_are_ahead(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UPLOAD_BYTES", 2**20)
    slow = master._nodes[0]
    here = torch.arange(2**15)  # 256 KiB
    there: list[torch.Tensor] = []

    def upload() -> None:
        for number in range(20):
            there.append((here + number).to("node:0"))

    with stopped(master, 0), in_thread(upload) as uploading:
        until(lambda: slow.streams[0].transfers.uploads == 2**20 and len(there) == 4)
        assert uploading.is_alive()
        assert (slow.streams[0].transfers.uploads, len(there)) == (2**20, 4)
        os.kill(master.pids[0], signal.SIGCONT)
    assert [each[-1].item() for each in there] == [2**15 - 1 + number for number in range(20)]
    master.synchronize()
    with slow.lock:
        slow.reap()
        assert (slow.streams[0].transfers.uploads, slow.streams[0].transfers.unsent) == (0, 0)


def test_a_tensor_that_is_larger_than_the_limit_goes_alone(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UPLOAD_BYTES", 1000)
    there = [torch.full((1000,), float(number)).to("node:0") for number in range(5)]
    assert [each.sum().item() for each in there] == [0.0, 1000.0, 2000.0, 3000.0, 4000.0]


def test_a_ctrl_c_ends_the_wait_for_a_slow_node_and_the_program_goes_on(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_COMMANDS", 500)
    monkeypatch.setattr(connection, "MAX_UPLOAD_BYTES", 2**20)
    slow = master._nodes[0]
    counted = torch.zeros(2, device="node:0")
    x = torch.ones(2, device="node:0") + 1
    master.synchronize()
    before = master.stats()[0]["tensors"]
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    def interrupted(program: Callable[[], object], waits: Callable[[], bool]) -> None:
        def press() -> None:
            until(waits)
            signal.pthread_kill(main, signal.SIGINT)

        with stopped(master, 0):
            pressing = threading.Thread(target=press)
            pressing.start()
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    program()
            pressing.join()

    def compute() -> None:
        counted.add_(1)
        _ = x + 1

    def upload() -> None:
        torch.ones(2**16).to("node:0")

    def waits() -> bool:
        return slow.pending >= 500

    interrupted(compute, waits)
    assert counted.tolist()[0] > 100  # each time three commands, and what waited is done
    interrupted(upload, lambda: slow.streams[0].transfers.uploads == 2**20)
    assert (x + 1).tolist() == [3.0, 3.0]
    master.synchronize()
    assert master.stats()[0]["tensors"] <= before + 1  # what was interrupted left no tensor


def test_a_ctrl_c_in_the_wait_of_what_names_a_tensor_leaves_no_name(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.zeros(2, device=master.place([0, 1]).device)
    gc.collect()  # or tensors of earlier tests may go meanwhile
    master.synchronize()
    before = master.stats()[0]["tensors"]

    def wait(_: connection.StreamConnection) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(connection.StreamConnection, "poll", wait)
        for _ in range(40):  # a look at the lines comes after some commands
            with contextlib.suppress(KeyboardInterrupt):
                whole.on(0)
    master.synchronize()
    assert master.stats()[0]["tensors"] == before


@pytest.mark.stress
def test_a_slow_node_costs_the_master_no_more_memory_than_the_limits_let_it(master: Master) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    slow = master._nodes[0]
    x, here = torch.zeros(2, device="node:0"), torch.ones(2**17)
    most = 0

    def compute() -> None:
        for _ in range(200_000):
            x.add_(1)

    def upload() -> None:
        nonlocal most
        for _ in range(1000):  # 512 MB
            here.to("node:0")
            most = max(most, slow.streams[0].transfers.uploads)

    for program, waits, bytes in (
        (compute, lambda: slow.pending >= connection.MAX_PENDING_COMMANDS, 64 << 20),
        (upload, lambda: slow.streams[0].transfers.uploads == connection.MAX_UPLOAD_BYTES, 256 << 20),
    ):
        master.synchronize()
        before = resident()
        with stopped(master, 0), in_thread(program):
            until(waits)
            assert resident() - before < bytes
            os.kill(master.pids[0], signal.SIGCONT)
    assert most == connection.MAX_UPLOAD_BYTES
    assert x.tolist() == [200_000.0] * 2
