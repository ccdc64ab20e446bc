"""Ranks as threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from shoal import GroupAborted, ProcessGroup, RemoteError
from shoal.testing import no_leaks, run_threads


def test_results_come_in_rank_order(store_backend: str) -> None:
    def add(group: ProcessGroup, amount: int) -> tuple[int, float]:
        x = torch.full((3,), float(group.rank + amount))
        return group.rank, group.all_reduce(x).wait().sum().item()

    assert run_threads(add, 3, 1, backend=store_backend) == [(0, 18.0), (1, 18.0), (2, 18.0)]


def test_a_rank_that_raises_ends_the_others_and_every_traceback_is_shown(store_backend: str) -> None:
    def fn(group: ProcessGroup) -> None:
        if group.rank == 1:
            raise KeyError("a bad day")
        group.barrier().wait()

    with pytest.raises(RemoteError) as caught:
        run_threads(fn, 3, backend=store_backend)
    text = str(caught.value)
    assert text.startswith("3 of 3 ranks failed, rank 1 first")
    assert "KeyError: 'a bad day'" in text
    assert text.count("GroupAborted") >= 2
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_deadline_shows_where_the_ranks_are_and_aborts_them(
    store_backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[BaseException] = []

    def fn(group: ProcessGroup) -> None:
        if group.rank == 0:
            return
        try:
            group.barrier().wait()
        except GroupAborted as error:
            seen.append(error)
            raise

    with pytest.raises(RemoteError, match="rank 1 was still running at the deadline") as caught:
        run_threads(fn, 2, backend=store_backend, timeout=2.0)
    assert "group.barrier().wait()" in str(caught.value)
    assert "Current thread" in capfd.readouterr().err
    assert len(seen) == 1
    assert "gave up after 2 s" in str(seen[0])


def test_the_hosts_of_ranks_can_be_chosen(store_backend: str) -> None:
    def fn(group: ProcessGroup) -> tuple[int, str]:
        return group.local_rank, group._backend.membership.host  # type: ignore[attr-defined]

    hosts = ["a", "b", "a", "b"]
    assert run_threads(fn, 4, backend=store_backend, hosts=hosts) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_nothing_is_left_behind(store_backend: str) -> None:
    with no_leaks():
        run_threads(lambda group: group.barrier().wait(), 4, backend=store_backend)


def test_a_thread_that_is_left_behind_is_reported() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="straggler")
    with pytest.raises(AssertionError, match="thread 'straggler'"), no_leaks(patience=0.05):
        thread.start()
    release.set()
    thread.join()


def test_a_descriptor_that_is_left_behind_is_reported() -> None:
    opened: list[int] = []
    with pytest.raises(AssertionError, match=r"descriptor \d+ -> /dev/null"), no_leaks(patience=0.05):
        opened.append(os.open("/dev/null", os.O_RDONLY))
    os.close(opened[0])
