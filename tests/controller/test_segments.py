"""Spaces, lines and segments, by themselves: each node gets its commands in the order of the program."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.controller.commands.connection import NodeConnection
from shoal.controller.commands.space import Space
from shoal.controller.protocol.commands import FREE, SEED
from shoal.rpc.connection.endpoint import pack

#: which nodes each space has
PLACES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]


class Node:
    """Takes batches, and replies when it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.futures: list[shoal.Future[Any]] = []

    def run(self, _: str, of: int, segments: list[tuple[Any, ...]]) -> shoal.Future[Any]:
        assert len(segments) > 10 or pack(segments, b"") is not None  # pickling takes several times as long
        for space, stream, numbers, scalars, id_limit, payloads in segments:
            assert (of, stream, scalars, payloads) == (0, 0, b"", [])
            given = array("I", numbers).tolist()
            while given:
                if given[0] == FREE:
                    assert given[1] < id_limit
                    del given[:2]
                else:
                    assert given[0] == SEED
                    self.taken.append((space, given[1]))
                    del given[:3]
        future: shoal.Future[Any] = shoal.Future()
        self.futures.append(future)
        return future

    def reply(self) -> None:
        """Acknowledge the first batch that is not."""
        for future in self.futures:
            if not future.done():
                future.set_result(([], []))
                return

    def reply_to_all(self) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(([], []))


class Bench:
    """Three nodes, and the spaces on them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nodes = [Node() for _ in range(3)]
        unused: Any = None
        self.connected: list[NodeConnection] = []
        self.connected += [
            NodeConnection(i, self.lock, unused, "session", node.run, self.connected)
            for i, node in enumerate(self.nodes)
        ]
        self.connections = [each.streams[0] for each in self.connected]
        self.spaces = [
            Space(torch.device("cpu", number), tuple(self.connections[i] for i in place), self.lock)
            for number, place in enumerate(PLACES)
        ]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for node in made.nodes:
        node.reply_to_all()
    for connection in made.connected:
        connection.close(shoal.ShoalError("the test is over"))


@pytest.mark.parametrize("seed", range(5))
def test_a_node_gets_the_commands_of_all_its_spaces_in_the_order_of_the_program(
    bench: Bench, seed: int
) -> None:
    drawn = random.Random(seed)
    issued: list[list[tuple[int, int]]] = [[] for _ in bench.nodes]
    held: list[tuple[Space, int]] = []

    def free(space: Space, id: int) -> None:
        space.freed.append(id)

    doing: list[tuple[Callable[[], object], float]] = [
        (lambda: bench.nodes[drawn.randrange(3)].reply(), 0.02),
        (lambda: bench.connections[drawn.randrange(3)].flush(), 0.01),
        (lambda: held and free(*held.pop(drawn.randrange(len(held)))), 0.1),
    ]
    number = 0
    for _ in range(1000):
        with bench.lock:
            for do, likely in doing:
                if drawn.random() < likely:
                    do()
            space = drawn.randrange(len(PLACES))
            held.append((bench.spaces[space], bench.spaces[space].new_id()))
            for _ in range(drawn.choice([1, 1, 1, 2, 40])):
                number += 1
                bench.spaces[space].seed(number)
                for i in PLACES[space]:
                    issued[i].append((space, number))
    for connection, node in zip(bench.connections, bench.nodes, strict=True):
        node.reply_to_all()
        with bench.lock:
            connection.reap()
            connection.flush()
        node.reply_to_all()
    assert [node.taken for node in bench.nodes] == issued


def test_spaces_that_share_no_node_do_not_cut_each_other(bench: Bench) -> None:
    with bench.lock:
        for number in range(20):
            bench.spaces[number % 3].seed(number)
        for connection in bench.connections:
            connection.flush()
            assert connection.batches[-1].origins == [[]]


def test_a_lost_node_takes_the_places_that_have_it_and_no_other(bench: Bench) -> None:
    with bench.lock:
        for number, space in enumerate(bench.spaces):
            space.seed(number)
        bench.connected[0].lose("a test")
        for space, place in zip(bench.spaces, PLACES, strict=True):
            if 0 in place:
                with pytest.raises(shoal.NodeLost, match="node 0"):
                    space.seed(100)
            else:
                space.seed(100)
        for connection in bench.connections[1:]:
            connection.flush()
    assert bench.nodes[1].taken == [(1, 1), (3, 3), (4, 4), (5, 5), (1, 100), (4, 100)]
    assert bench.nodes[2].taken == [(2, 2), (4, 4), (5, 5), (2, 100), (4, 100)]


def test_what_one_node_is_sent_is_sent_to_the_others_of_the_place_soon(bench: Bench) -> None:
    with bench.lock:
        bench.spaces[5].seed(1)
        bench.connections[0].flush()
    for node in bench.nodes:
        for _ in range(10_000):
            if node.taken:
                break
            threading.Event().wait(0.001)
        assert node.taken == [(5, 1)]
