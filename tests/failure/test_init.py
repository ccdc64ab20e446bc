"""Ranks that leave, or are killed, while others are still in init; and the next start at the same place."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.starts import PHASES, WAYS, End, Start, place, served

_UNKNOWN = "before it claims its rank"


@pytest.mark.concurrency
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_may_leave_the_moment_its_init_returns(way: str, tmp_path: Path) -> None:
    """Rank 0, with the store that it may serve, is gone before the others hear that it is connected."""
    where = place(way, tmp_path)
    transport = "tcp" if way == "tcp" else "auto"
    with served(way, where, 3), Start(way, where, 3, hears_late=0.2, transport=transport) as start:
        assert start.ends() == [End(0)] * 3


@pytest.mark.concurrency
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_init_is_named_and_the_next_start_succeeds(phase: str, tmp_path: Path) -> None:
    # Rank 2 connects to both others; the way differs by phase, so that each has its turn.
    way = ("file", "launched", "tcp", "torch_file", "backend_file", "torchrun")[[*PHASES].index(phase)]
    where = place(way, tmp_path)
    with served(way, where, 3):
        with Start(way, where, 3, dies={2: phase}) as start:
            if phase == _UNKNOWN:
                start.processes[2].join()  # nobody knows of it: the others wait
                start.kill(0)
                start.kill(1)
            ends = start.ends()
        assert ends[2].code == -signal.SIGKILL
        if phase != _UNKNOWN:
            for end in ends[:2]:
                assert end.code == 1
                assert "RendezvousError" in end.error
                assert "rank 2 (process " in end.error
                assert "died while the ranks were meeting" in end.error
        with Start(way, where, 3) as again:
            assert again.ends() == [End(0)] * 3


@pytest.mark.concurrency
@pytest.mark.parametrize("phase", ["when it has its rank", "before it connects"])
def test_rank_0_killed_with_the_store_that_it_serves_is_named(phase: str, tmp_path: Path) -> None:
    where = place("tcp", tmp_path)
    # Rank 0 connects to nobody, so it dies where it accepts.
    with Start("tcp", where, 3, dies={0: phase.replace("before it connects", "while it connects")}) as start:
        if phase == "when it has its rank":
            # Whether the others have seen its rank by then is chance, and they may wait for another rank 0.
            start.processes[0].join()
            start.kill(1)
            start.kill(2)
            start.ends()
        else:
            for end in start.ends()[1:]:
                assert "rank 0 (process " in end.error
    with Start("tcp", where, 3) as again:
        assert again.ends() == [End(0)] * 3


@pytest.mark.concurrency
@pytest.mark.parametrize("way", ["file", "launched", "torch_file"])
def test_a_rank_that_came_alone_and_was_killed_is_in_nobodys_way(way: str, tmp_path: Path) -> None:
    where = place(way, tmp_path)
    with served(way, where, 2):
        with Start(way, where, 2, ranks=[0], dies={0: "when it has its rank"}) as start:
            assert start.ends() == [End(-signal.SIGKILL)]
        with Start(way, where, 2, pauses=[0.1, 0.0]) as again:
            assert again.ends() == [End(0)] * 2


@pytest.mark.concurrency
def test_ranks_killed_together_are_in_nobodys_way(tmp_path: Path) -> None:
    _kill_and_start_again("file", tmp_path, random.Random(1), rounds=4)


@pytest.mark.stress
@pytest.mark.concurrency
@pytest.mark.parametrize("way", WAYS)
def test_ranks_leave_and_are_killed_at_random_moments_of_init(way: str, tmp_path: Path) -> None:
    chance = random.Random(way)
    for number in range(30):
        directory = tmp_path / str(number)
        directory.mkdir()
        where, size = place(way, directory), chance.choice([1, 2, 3, 4, 8])
        pauses = [chance.random() * chance.choice([0.0, 0.005, 0.05]) for _ in range(size)]
        leave, transport = chance.choice(["exit", "close"]), chance.choice(["auto", "tcp"])
        with (
            served(way, where, size),
            Start(way, where, size, pauses=pauses, leave=leave, transport=transport) as start,
        ):
            assert start.ends() == [End(0)] * size
    # Torch's own store does not survive the kill of the rank that serves it, or of one that it waits for.
    if "torch" not in way and "backend" not in way:
        _kill_and_start_again(way, tmp_path, chance, rounds=30)


def _kill_and_start_again(way: str, directory: Path, chance: random.Random, rounds: int) -> None:
    """Kill ranks of a start at random moments, end the others, and start again at the same place."""
    where = place(way, directory)
    with served(way, where, 3) if way == "launched" else contextlib.nullcontext():
        for _ in range(rounds):
            with Start(way, where, 3, leave="close") as start:
                time.sleep(chance.random() * 0.15)
                for victim in chance.sample(range(3), chance.choice([1, 1, 2, 3])):
                    start.kill(victim)
                if chance.random() < 0.5:
                    time.sleep(chance.random() * 0.3)  # the others find out, or they do not
                for rank in range(3):
                    start.kill(rank)
                start.ends()
            with Start(way, where, 3, leave="close") as again:
                assert again.ends() == [End(0)] * 3
