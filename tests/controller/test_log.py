"""The log of commands: order, batches, back-pressure, several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.controller import Master
from shoal.controller.commands import connection

NODE = "node:0"


def test_commands_reach_an_idle_node_without_a_wait_for_them(master: Master) -> None:
    x = torch.zeros(3, device=NODE)
    x.add_(1)
    for _ in range(10_000):  # nothing here flushes the log
        with master._lock:
            pending = master.stats()[0]["pending"]
        if not pending:
            break
        threading.Event().wait(0.001)
    assert not pending


def test_a_node_that_is_slow_holds_the_program_back(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_COMMANDS", 2000)
    x = torch.zeros(300, 300, device=NODE)
    for _ in range(60):
        x = x @ x  # a millisecond each
    most = 0
    y = torch.zeros(3, device=NODE)
    for _ in range(6000):
        y = y + 1
        most = max(most, master._nodes[0].pending)
    assert most <= 2000 + 128
    assert y[0].item() == 6000


def test_threads_issue_operations_side_by_side(master: Master) -> None:
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        x = torch.zeros(2, device=f"node:{index % 2}", requires_grad=True)
        y: torch.Tensor = x
        for step in range(300):
            y = y + index
            if step % 100 == 50:
                assert y[0].item() == (step + 1) * index
        y.sum().backward()
        assert x.grad is not None
        results[index] = (y.tolist(), x.grad.tolist())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [([300 * index] * 2, [1, 1]) for index in range(4)]


def test_calls_that_are_known_are_forgotten_when_there_are_too_many(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controller.tensor.calls.MAX_INTERNED_CALLS", 8)
    x = torch.arange(64.0, device=NODE)
    for length in range(1, 40):
        assert x[:length].sum().item() == length * (length - 1) / 2
    assert len(master.space(0).calls) <= 8


def test_a_number_in_the_place_of_a_tensor_is_an_operand_of_its_own_type(master: Master) -> None:
    numbers = [1, True, 1.0, 0, False, 0.0, -0.0, 2**60, 0.5]
    for here in (torch.arange(3), torch.tensor([True, False]), torch.ones(2)):
        x = here.to(NODE)
        for number in numbers:
            there, expected = (x * number).cpu(), here * number
            assert (there.dtype, str(there.tolist())) == (expected.dtype, str(expected.tolist()))
    before = master.stats()[0]["calls"]
    for number in range(50):
        y = x / (number + 0.5)
    assert y[0].item() == torch.tensor(1 / 49.5).item()
    assert master.stats()[0]["calls"] <= before + 3


def test_values_come_though_ids_are_freed_right_after_something_was_sent(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(3, device=NODE)
    held: list[torch.Tensor] = []
    look = connection.StreamConnection.poll

    def look_and_free(looking: connection.StreamConnection) -> None:
        look(looking)
        held.clear()

    monkeypatch.setattr(connection.StreamConnection, "poll", look_and_free)
    for _ in range(100):
        held.append(x + 1)
        assert x.tolist() == [0, 1, 2]
        assert x.nonzero().tolist() == [[1], [2]]


def test_a_large_tensor_may_be_changed_as_soon_as_it_was_sent(master: Master) -> None:
    large = torch.empty(2**19)
    sent = []
    for value in range(8):
        large.fill_(value)
        sent.append(large.to(NODE))
        sent.append(large.view(2, -1).t().to(NODE))  # not contiguous, and so not as it is
        sent.append(large[1:].to(NODE))
    large.zero_()
    for index, there in enumerate(sent):
        assert there.min().item() == there.max().item() == index // 3
    there = sent[-2]
    assert (there.shape, there.stride()) == ((2**18, 2), (1, 2**18))
    assert there.mul_(2)[5, 1].item() == 14  # the memory is the node's own


def test_what_goes_to_a_node_is_not_copied_there_again(master: Master) -> None:
    def issued(how: Callable[[], torch.Tensor]) -> int:
        before = master.stats()[0]["issued"]
        assert how().tolist() == [[1, 2], [3, 4]]
        return master.stats()[0]["issued"] - before

    here = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert min(issued(lambda: here.to(NODE)) for _ in range(100)) == 1
    there = torch.empty(2, 2, device=NODE)
    assert issued(lambda: there.copy_(here)) == 1


def test_who_shares_the_memory_of_a_tensor_sees_what_is_copied_to_it(master: Master) -> None:
    here = torch.arange(6.0).view(2, 3)
    for _ in range(20):
        there = torch.empty_strided((2, 3), (3, 1), device=NODE)
        same, part = there.detach(), there[1]
        there.copy_(here)
        assert part.tolist() == [3, 4, 5]
        assert same.tolist() == there.tolist() == here.tolist()
        blank = torch.empty_strided((2, 3), (3, 1), device=NODE)
        same = blank.detach()
        blank.copy_(here)
        assert same.tolist() == here.tolist()
        turned = torch.empty_strided((2, 3), (1, 2), device=NODE)
        turned.copy_(here)
        assert (turned.stride(), turned.tolist()) == ((1, 2), here.tolist())


def _resident(pid: int) -> int:
    """Bytes of a process's memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.stress
def test_a_million_operations_leave_nothing_behind(master: Master) -> None:
    pids = os.getpid(), master.pids[0]
    x = torch.zeros(2, device=NODE)

    def issue(count: int) -> None:
        nonlocal x
        for _ in range(count):
            x = x + 1

    issue(100_000)  # what is kept for the next ones is there
    master.synchronize()
    before, memory = master.stats()[0], [_resident(pid) for pid in pids]
    issue(1_000_000)
    assert x[0].item() == 1_100_000
    after = master.stats()[0]
    assert after["tensors"] <= before["tensors"] + 2
    assert after["calls"] <= before["calls"] + 4
    assert after["issued"] - before["issued"] >= 1_000_000
    for pid, was in zip(pids, memory, strict=True):
        assert _resident(pid) - was < 8 * 2**20  # 8 bytes an operation would be seen
