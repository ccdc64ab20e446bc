"""Nodes and masters that die: by signals, in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.controller import masters
from tests.controller.nodes import Program, programs, wait_until_gone

start = pytest.fixture(programs)
Start = Callable[..., Program]


def test_a_killed_node_is_an_error_at_the_next_use_and_others_go_on(start: Start) -> None:
    program = start(masters.loses_a_node)
    nodes = program.told()
    assert program.told() == "done"
    assert program.ended() == 0
    wait_until_gone(nodes)


def test_a_killed_node_ends_what_waits_for_its_events(start: Start) -> None:
    program = start(masters.loses_a_node_that_others_wait_for)
    nodes = program.told()
    assert program.told() == "done"
    assert program.ended() == 0
    wait_until_gone(nodes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_master_is_killed(start: Start, how: signal.Signals) -> None:
    program = start(masters.works_for_ever)
    nodes = program.told()
    os.kill(program.pid, how)
    assert program.ended() == -how
    wait_until_gone(nodes)


def test_nothing_is_left_when_the_master_dies_before_its_nodes_have_joined(start: Start) -> None:
    program = start(masters.dies_before_its_nodes_have_joined)
    nodes = program.told()
    assert program.ended() == -signal.SIGKILL
    wait_until_gone(nodes)


def test_a_process_may_be_a_master_again_and_end_without_closing(start: Start) -> None:
    program = start(masters.fails_unseen_and_begins_again)
    (warned,) = program.told()
    assert "1 operations failed and their errors were not raised" in warned
    assert "aten.index.Tensor" in warned
    assert all(program.told()), "torch is not as it was"
    assert program.told() == "node 0 is closed: its master was closed"
    nodes = program.told()
    assert program.told() == 1.0
    assert program.ended() == 0
    wait_until_gone(nodes)


def test_an_interrupt_ends_a_wait_and_never_the_queue(start: Start) -> None:
    program = start(masters.is_interrupted)
    assert program.told() == [1.5] * 3
    assert program.told() == "done"


def test_a_node_that_cannot_start_is_told(start: Start) -> None:
    assert "the process of node 0 ended with 1 before it joined" in start(masters.cannot_start).told()


def test_a_master_closes_while_a_node_is_busy_for_ever(start: Start) -> None:
    program = start(masters.closes_while_a_node_is_busy)
    assert program.told() == "closed"
