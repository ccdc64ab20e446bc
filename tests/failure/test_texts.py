"""What errors say, once; and texts reach the other ranks whatever is in them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal import GroupAborted, ProcessGroup
from shoal.net import Deadline
from shoal.testing import run_threads

PATIENCE = 40.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("reason", "heard"),
    [
        ("é" * 50_000, "é" * 30_000),
        ("x" + "é" * 50_000, "x" + "é" * 30_000),
        ("\U0001f41f" * 30_000, "\U0001f41f" * 15_000),
        ("a file named \udcff", "a file named \\udcff"),
        ("\ud83d alone", "\\ud83d alone"),
        ("a\0b", "a\0b"),
    ],
    ids=["two bytes", "two bytes, shifted", "four bytes", "undecodable", "half a pair", "nul"],
)
def test_every_rank_hears_the_reason_of_an_abort(reason: str, heard: str, transport: str) -> None:
    def abort(group: ProcessGroup) -> None:
        inner = group.subgroup([0, 1], name="na\udce9me")
        assert "na\\udce9me" in inner.name
        if inner.rank == 0:
            inner.recv(None, 1)
            group.barrier().wait()
            inner.abort(reason)
        else:
            future = inner.recv(None, 0)
            group.barrier().wait()
            with pytest.raises(GroupAborted) as caught:
                future.wait(PATIENCE)
            text = str(caught.value)
            assert f"aborted the group: {heard}" in text
            text.encode()
            with pytest.raises(GroupAborted):
                inner.barrier()
        assert inner.state == "aborted"
        inner.close(PATIENCE)

    run_threads(abort, 2, transport=transport, timeout=PATIENCE)


def late(group: ProcessGroup, heard: threading.Event) -> None:
    if group.rank == 0:
        try:
            group.all_reduce(torch.ones(4), timeout=0.2).wait(PATIENCE)
        finally:
            heard.set()
    else:
        assert heard.wait(PATIENCE)
        patience = Deadline(PATIENCE)
        while group.state == "open" and not patience.expired:  # what rank 0 says is on its way
            time.sleep(0.001)
        group.all_reduce(torch.ones(4)).wait(PATIENCE)


def late_message(group: ProcessGroup, heard: threading.Event) -> None:
    if group.rank == 0:
        try:
            group.recv(None, 1, timeout=0.2).wait(PATIENCE)
        finally:
            heard.set()
    assert heard.wait(PATIENCE)


def different(group: ProcessGroup, _: threading.Event) -> None:
    (group.barrier() if group.rank == 0 else group.all_reduce(torch.ones(4))).wait(PATIENCE)


def aborted(group: ProcessGroup, _: threading.Event) -> None:
    if group.rank == 0:
        group.abort("enough")
    else:
        group.all_reduce(torch.ones(4)).wait(PATIENCE)


def uneven(group: ProcessGroup, _: threading.Event) -> None:
    for _batch in range(2 + group.rank):
        group.all_reduce(torch.ones(4)).wait(PATIENCE)


def uneven_training(group: ProcessGroup, _: threading.Event) -> None:
    model = shoal.DistributedDataParallel(torch.nn.Linear(2, 2), group=group)
    for _batch in range(2 + group.rank):
        model(torch.ones(1, 2)).sum().backward()


HERE = r"\(operation 0\) on rank {} of group 'world' \(no operation had completed here\) "
UNEVEN = (
    r" failed: rank 0 has closed the group and left, and will not take part\.  Most often the ranks have "
    r"uneven inputs: .* `with model\.join\(\):` \(see Join\)$"
)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("scene", "kind", "texts"),
    [
        (
            late,
            shoal.OperationTimeout,
            {
                0: "^all_reduce " + HERE.format(0) + "did not finish within its timeout of 0.2 s; ranks",
                1: r"^group 'world' on rank 1 is broken: all_reduce \(operation 0\) did not finish .*: 1 "
                r"\(reported by rank 0\)$",
            },
        ),
        (
            late_message,
            shoal.OperationTimeout,
            {0: r"^recv from rank 1 \(tag 0\) on rank 0 of group 'world' \(.*here\) did not finish"},
        ),
        (
            different,
            shoal.CollectiveMismatch,
            {
                0: "^barrier " + HERE.format(0) + "failed: the ranks called different things as .* 0:\n"
                r"  rank 0: barrier\(\)\n  rank 1: all_reduce\(float32\[4\], op=SUM\)$",
                1: "^all_reduce " + HERE.format(1) + "failed: the ranks called different things",
            },
        ),
        (aborted, GroupAborted, {1: "rank 0 aborted the group: enough$"}),
        (uneven, shoal.GroupClosed, {1: UNEVEN}),
        (uneven_training, shoal.GroupClosed, {1: UNEVEN}),
    ],
)
def test_an_error_says_everything_once(
    scene: Callable[..., None], kind: type[Exception], texts: dict[int, str], transport: str
) -> None:
    heard = threading.Event()

    def rank(group: ProcessGroup) -> str:
        try:
            scene(group, heard)
        except kind as error:
            return str(error)
        return ""

    said = run_threads(rank, 2, transport=transport, timeout=PATIENCE)
    for number, text in enumerate(said):
        assert bool(text) == (number in texts), said
        if text:
            assert re.search(texts[number], text), text
            for words in ("did not finish", "of group", "completed here", "rank 0 aborted"):
                assert text.count(words) <= 1, text


def test_a_call_on_a_broken_group_keeps_the_ranks_and_no_callers_frames() -> None:
    over = threading.Event()

    def rank(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(shoal.OperationTimeout):
                group.recv(None, 1, timeout=0.1).wait(PATIENCE)
            over.set()
            for _ in range(2):
                with pytest.raises(
                    shoal.OperationTimeout, match=r"^group .world. on rank 0 is broken: recv"
                ) as hit:
                    group.barrier()
                assert hit.value.ranks == (1,)
                assert len(hit.traceback) < 6
        assert over.wait(PATIENCE)

    run_threads(rank, 2, timeout=PATIENCE)


def test_an_object_that_cannot_be_sent_and_a_future_that_is_late_name_the_operation() -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(shoal.UsageError, match=f"type function on rank {group.rank} cannot be pickled"):
            group.all_gather_object(lambda: 1)
        if group.rank == 0:
            future = group.all_reduce(torch.ones(1))
            with pytest.raises(shoal.WaitTimeout, match=r"<shoal\.Future of all_reduce #0 0x"):
                future.wait(0.01)
            group.store.set("waited", b"")
            future.wait(PATIENCE)
        else:
            group.store.get("waited")
            group.all_reduce(torch.ones(1)).wait(PATIENCE)

    run_threads(rank, 2, timeout=PATIENCE)
