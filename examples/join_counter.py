"""Count batches over ranks with uneven numbers of batches: a user-defined class within a Join.

    $ shoal run -n 3 examples/join_counter.py
    [2] step 1: ranks active: 3, batches so far: 3
    [2] step 2: ranks active: 3, batches so far: 6
    [2] step 3: ranks active: 2, batches so far: 8
    [2] step 4: ranks active: 2, batches so far: 10
    [2] step 5: ranks active: 1, batches so far: 11
    [2] step 6: ranks active: 1, batches so far: 12
    [2] batches of all ranks, as rank 0, 1, ... knows them: [12, 12, 12]

On a single process it does the same:

    $ python examples/join_counter.py

Rank *r* has `--batches` times *r* + 1 batches. In every step the counter sums the number of ranks with a
batch, in a collective of all ranks. A rank without further batches still takes part: the counter's
`main_hook` contributes a zero, until no rank has a batch left. Its own count is outdated by then, so in the
`post_hook` the ranks that counted to the end send their total to the others.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import shoal


def sum_over_ranks(group: shoal.ProcessGroup, number: int) -> int:
    """Return the sum of all ranks' numbers; a collective."""
    return int(group.all_reduce(torch.tensor(number)).wait())


class BatchCounter(shoal.Joinable):
    """Counts batches over all ranks.

    Args:
        group: the ranks; each calls the counter once per batch.

    Attributes:
        total: number of batches so far on all ranks.
        active: number of ranks that took part in the last step.
    """

    def __init__(self, group: shoal.ProcessGroup) -> None:
        shoal.Joinable.__init__(self)
        self.group = group
        self.total = 0
        self.active = group.size

    def __call__(self) -> None:
        notified = shoal.Join.notify_join_context(self)  # must precede all other communication
        self.total += sum_over_ranks(self.group, 1)
        if notified is not None:  # None outside a Join, and if another joinable comes first
            self.active = int(notified.wait())

    # Required of every joinable:

    def join_hook(self, **kwargs: Any) -> shoal.JoinHook:
        return BatchCounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> shoal.ProcessGroup:
        return self.group


class BatchCounterHook(shoal.JoinHook):
    """The operations of a rank that has no batch left."""

    def __init__(self, counter: BatchCounter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        """Take part in a step of the other ranks: the same collectives in the same order."""
        sum_over_ranks(self.counter.group, 0)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the total of those that counted to the end, which is the largest."""
        total = torch.tensor(self.counter.total if is_last_joiner else 0)
        self.counter.total = int(self.counter.group.all_reduce(total, op="max").wait())


def count(group: shoal.ProcessGroup, batches: int, *, talk: bool = False) -> BatchCounter:
    """Count the batches of all ranks; this rank has ``batches``."""
    counter = BatchCounter(group)
    with shoal.Join([counter]):
        for step in range(1, batches + 1):
            counter()
            if talk:
                print(
                    f"step {step}: ranks active: {counter.active}, batches so far: {counter.total}",
                    flush=True,
                )
    return counter


def main() -> None:
    parser = argparse.ArgumentParser(description="Count batches over ranks with uneven numbers of them.")
    parser.add_argument("--batches", type=int, default=2, help="of rank 0; rank r has r + 1 times as many")
    options = parser.parse_args()

    with shoal.init() as group:
        longest = group.rank == group.size - 1
        counter = count(group, options.batches * (group.rank + 1), talk=longest)
        totals = group.all_gather_object(counter.total).wait()
        if longest:
            print(f"batches of all ranks, as rank 0, 1, ... knows them: {totals}", flush=True)


if __name__ == "__main__":
    main()
