"""Which step survivors go on with: a model of commits, deaths and rebuilds."""

from __future__ import annotations

import random

import pytest

from shoal.elastic.commit import RankProgress, num_completed_steps, was_interrupted


def test_a_note_is_read_as_it_was_written() -> None:
    assert RankProgress.decode(RankProgress(7, 7, 2).encode()) == RankProgress(7, 7, 2)
    assert RankProgress.decode(RankProgress(3).encode()) == RankProgress(3, -1, 0)
    for last in (RankProgress(3, epoch=2, in_step=True), RankProgress(3, ends=True)):
        assert RankProgress.decode(last.encode()) == last


@pytest.mark.parametrize(
    ("survivors", "count"),
    [
        ([RankProgress(5)], 5),
        ([RankProgress(5, 5)], 6),
        ([RankProgress(5, 5), RankProgress(5, 5)], 6),
        ([RankProgress(5, 5), RankProgress(5)], 5),
        ([RankProgress(5, 5), RankProgress(6)], 6),
        ([RankProgress(5, 5), RankProgress(6, 6)], 6),
        ([RankProgress(5, 5, 1), RankProgress(5, 5, 0)], 5),
        ([RankProgress(5, 5), RankProgress(6, ends=True)], 6),
    ],
)
def test_a_step_counts_that_a_survivor_committed_or_that_all_prepared(
    survivors: list[RankProgress], count: int
) -> None:
    assert num_completed_steps(survivors) == count
    assert num_completed_steps(reversed(survivors)) == count


@pytest.mark.parametrize(
    ("survivors", "interrupted"),
    [
        ([RankProgress(5, 5, 1, True), RankProgress(6)], False),  # a block in which a rank prepared the step
        ([RankProgress(5, 5, 1, True), RankProgress(6, -1, 1, True)], True),
        ([RankProgress(5, 5, 1), RankProgress(6, -1, 1, True)], True),
        ([RankProgress(6), RankProgress(6, 6, 1, True)], True),
        ([RankProgress(6), RankProgress(6, -1, 0, True)], False),  # a note of the previous epoch
    ],
)
def test_a_step_is_interrupted_in_which_any_survivor_was(
    survivors: list[RankProgress], interrupted: bool
) -> None:
    assert was_interrupted(survivors, num_completed_steps(survivors), 1) is interrupted


class Model:
    """Ranks that prepare steps, commit them and die; a rebuild may be repeated for some of them only."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.ranks = {rank: RankProgress(0) for rank in range(choose.randint(2, 5))}
        self.epoch = 0
        #: steps that some rank has ever counted: its parameters have changed
        self.applied = 0

    def run_a_step(self) -> None:
        """Some ranks prepare the step; if all do, some get through the exchange."""
        ranks = self.ranks
        preparing = [rank for rank in ranks if self.choose.random() < self.choose.choice((0.7, 1.0))]
        for rank in preparing:
            step = ranks[rank].committed
            ranks[rank] = RankProgress(step, step, self.epoch)
        if len(preparing) == len(ranks):
            for rank in ranks:
                if self.choose.random() < 0.7:
                    ranks[rank] = RankProgress(ranks[rank].committed + 1)
                    self.applied = max(self.applied, ranks[rank].committed)

    def is_whole(self) -> bool:
        """Whether all got through: there was no fault."""
        return len({each.committed for each in self.ranks.values()}) == 1 and all(
            each.prepared < 0 for each in self.ranks.values()
        )

    def rebuild(self) -> None:
        """Ranks die, and the others go on.  After a second death some have come back from the first
        agreement, and others repeat the rebuild with the note that they gave before."""
        ranks = self.ranks
        for rank in self.some(max_size=len(ranks) - 1):
            del ranks[rank]
        count = num_completed_steps(ranks.values())
        assert count >= self.applied, "a step was dealt again that a rank has applied"
        assert count <= self.applied or all(
            each.prepared == self.applied or each.committed > self.applied for each in ranks.values()
        ), "a step counts of which a survivor has no averages"
        notes = dict(ranks)
        self.applied = count
        self.epoch += 1
        back = self.some(max_size=len(ranks) - 1)
        for rank in ranks:
            ranks[rank] = RankProgress(count)
        if back and self.choose.random() < 0.5:
            self.second_death(count, notes, back)

    def second_death(self, count: int, notes: dict[int, RankProgress], back: list[int]) -> None:
        for rank in back:  # they are alone in the new group, and can prepare at most
            if self.choose.random() < 0.5:
                self.ranks[rank] = RankProgress(count, count, self.epoch)
                notes[rank] = self.ranks[rank]
            else:
                notes[rank] = RankProgress(count)
        again = num_completed_steps(notes.values())
        assert again == count, "the first agreement, and a second one of which some take the first"
        self.epoch += 1
        for rank in back:
            self.ranks[rank] = RankProgress(count)

    def some(self, max_size: int) -> list[int]:
        return self.choose.sample(sorted(self.ranks), self.choose.randint(0, max_size))


def test_no_step_is_lost_that_was_applied_and_none_counts_without_its_averages() -> None:
    for seed in range(3000):
        model = Model(random.Random(seed))
        for _ in range(12):
            model.run_a_step()
            if not model.is_whole() or (model.choose.random() < 0.2 and len(model.ranks) > 1):
                model.rebuild()
