"""A discrete-event simulation of a schedule, to verify the closed formulas.

A rank begins a round when its earlier rounds are complete: their messages have arrived and are reduced.
Sending does not block it, but its messages leave one after another.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field

from .algorithms import Algorithm, Round
from .parameters import Parameters


@dataclass
class _Rank:
    rounds: deque[Round]
    out_free: float = 0.0
    in_free: float = 0.0
    arrived: Counter[int] = field(default_factory=Counter)


def simulate(algorithm: Algorithm, ranks: int, nbytes: float, machine: Parameters) -> float:
    """Return the seconds until all ranks have finished; raises ``RuntimeError`` for a deadlock."""
    world = [_Rank(deque(algorithm.rounds(rank, ranks, nbytes))) for rank in range(ranks)]
    heads: list[tuple[float, int, int, int, float]] = []  # (time, number, from, to, bytes) of first bytes
    sent = 0
    finished = 0.0

    def send(rank: int, now: float) -> None:
        nonlocal sent
        me = world[rank]
        for to, size in me.rounds[0].sends:
            start = max(now, me.out_free)
            me.out_free = start + machine.message(size)
            heapq.heappush(heads, (start + machine.latency, sent, rank, to, size))
            sent += 1

    def advance(rank: int, now: float) -> None:
        """Complete all rounds whose messages have arrived, and begin the next one."""
        nonlocal finished
        me = world[rank]
        while me.rounds and all(me.arrived[source] > 0 for source in me.rounds[0].receives):
            done = me.rounds.popleft()
            me.arrived.subtract(done.receives)
            now += done.reduces * machine.gamma
            finished = max(finished, now, me.out_free if not me.rounds else 0.0)
            if me.rounds:
                send(rank, now)

    for rank, me in enumerate(world):
        if me.rounds:
            send(rank, 0.0)
            advance(rank, 0.0)
    while heads:
        head, _, source, to, size = heapq.heappop(heads)
        me = world[to]
        me.in_free = max(head, me.in_free) + machine.message(size)
        me.arrived[source] += 1
        advance(to, me.in_free)
    if any(me.rounds for me in world):
        raise RuntimeError(f"{algorithm.name} over {ranks} ranks stands still")
    return finished
