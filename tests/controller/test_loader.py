"""Loaders that run on the nodes: ``Master.load``."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.controller import Master, RemoteTensor

NODE = "node:1"


def batches(index: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches, the last a shorter one."""
    for rows in (4, 4, 3):
        yield torch.full((rows, 2), float(index)), torch.arange(rows) + 10 * count


def read_ahead() -> tuple[int, int]:
    """Loaders on this node, and threads that read them."""
    from shoal.controller.node import loader

    return len(loader._loadings), sum(t.name == "shoal-node-loader" for t in threading.enumerate())


def nothing_is_left(master: Master, node: object = NODE) -> None:
    def settled() -> tuple[int, int]:
        for thread in threading.enumerate():
            if thread.name == "shoal-node-loader":
                thread.join(20)
        return read_ahead()

    assert master.call(node, settled) == (0, 0)  # type: ignore[arg-type]


def test_batches_stay_on_the_node(master: Master) -> None:
    found = list(master.load(NODE, batches))
    assert [x.shape for x, _ in found] == [(4, 2), (4, 2), (3, 2)]
    for x, y in found:
        assert type(x) is RemoteTensor
        assert x.get_node() == y.get_node() == 1
    assert [y.tolist()[0] for _, y in found] == [10, 10, 10]
    nothing_is_left(master)


def test_on_a_place_each_node_has_a_loader_of_its_own(master: Master) -> None:
    place = master.nodes[:2]
    found = list(master.load(place, batches))
    assert len(found) == 3
    x, y = found[2]
    assert x.device == y.device == place.device
    assert [x.on(i).tolist() for i in (0, 1)] == [[[i, i]] * 3 for i in (0.0, 1.0)]
    assert y.on(1).tolist() == [20, 21, 22]
    for node in place.indices:
        nothing_is_left(master, node)


def uneven(index: int, count: int) -> Iterator[dict[str, object]]:
    for i in range(3 + 4 * index):
        yield {"x": torch.ones(2) * i, "i": i}


def test_the_shortest_loader_ends_it(master: Master) -> None:
    found = list(master.load(master.nodes[:2], uneven))
    assert [each["i"] for each in found] == [0, 1, 2]
    for node in (0, 1):
        nothing_is_left(master, node)


def test_batches_that_differ_among_nodes_are_refused(master: Master) -> None:
    def differing(index: int, count: int) -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        yield torch.ones(2 + index)

    loaded = master.load(master.nodes[:2], differing)
    assert next(loaded).numel() == 2
    with pytest.raises(shoal.UsageError, match="must be alike"):
        next(loaded)
    nothing_is_left(master)


def test_what_a_loader_raises_comes_in_the_place_of_its_batch(master: Master) -> None:
    def failing(index: int, count: int) -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise OSError("the disk is gone")

    loaded = master.load(NODE, failing)
    assert next(loaded).item() == 1.0
    with pytest.raises(shoal.RemoteOpError, match="OSError: the disk is gone") as caught:
        next(loaded)
    assert "in failing" in caught.value.traceback
    assert "next(loaded)" in str(caught.value.line)
    nothing_is_left(master)
    with pytest.raises(shoal.RemoteOpError, match="ZeroDivisionError"):
        list(master.load(NODE, lambda index, count: 1 // 0))  # type: ignore[arg-type]
    nothing_is_left(master)


def test_leaving_early_leaves_nothing(master: Master) -> None:
    def endless(index: int, count: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1000)

    gc.collect()
    master.synchronize()
    before = master.stats()[1]["tensors"]
    for x in master.load(NODE, endless):
        assert x.sum().item() == 1000
        break
    del x
    gc.collect()
    nothing_is_left(master)
    assert master.stats()[1]["tensors"] <= before

    def soon(index: int, count: int) -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise OSError

    for _ in master.load(NODE, soon):
        break  # before the failure, of which nobody hears
    nothing_is_left(master)
    unused = master.load(NODE, endless)
    del unused
    nothing_is_left(master)


def test_two_batches_are_read_ahead(master: Master) -> None:
    def counting(index: int, count: int) -> Iterator[int]:
        import builtins

        for i in range(100):
            builtins.read = i + 1  # type: ignore[attr-defined]
            yield i

    def read() -> int:
        import builtins

        return int(builtins.read)  # type: ignore[attr-defined]

    loaded = master.load(NODE, counting)
    assert next(loaded) == 0
    # Two are asked for, two wait at the node, and one more was made when there was no room for it.
    assert 3 <= master.call(NODE, read) <= 6
    loaded.close()  # type: ignore[attr-defined]
    nothing_is_left(master)
