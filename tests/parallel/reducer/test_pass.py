"""A backward pass as cpp/ddp/pass decides it, with recorded actions in the place of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.core import OUTCOME, Mark, Pass, PassEnd


class Actions:
    """Records what a pass asks for, and answers for the only rank.

    Attributes:
        calls: the name of each function that was called, and the bucket.
        unneeded: buckets in which no rank has a gradient.
        used: the parameters whose averages were delivered.
    """

    def __init__(self, passes: Pass, unneeded: Collection[int] = ()) -> None:
        self._pass = passes
        self.calls: list[tuple[str, int]] = []
        self.unneeded = unneeded
        self.used: list[bool] | None = None
        self._tail = [0.0] * 3

    def fill(self, bucket: int) -> bool:
        self.calls.append(("fill", bucket))
        if bucket == OUTCOME:
            self._tail = self._pass.tail()
        return bucket not in self.unneeded

    def send(self, bucket: int) -> None:
        self.calls.append(("send", bucket))
        if bucket == OUTCOME:
            self._flags = self._pass.flags([False] * len(self._pass.counts()))

    def wait(self, bucket: int) -> None:
        self.calls.append(("wait", bucket))
        if bucket != OUTCOME:
            return
        if self._pass.separate:
            self._pass.decode_flags(self._flags)
        else:
            self._pass.decode_tail(self._tail, 1e-7)

    def deliver(self, used: list[bool]) -> None:
        self.used = used

    def names(self, name: str) -> list[int]:
        return [bucket for called, bucket in self.calls if called == name]


def arrive(passes: Pass, actions: Actions, indices: Iterable[int], unreached: Sequence[int] = ()) -> None:
    """Gradients come, and the frontend does what their marks say."""
    for index in indices:
        if passes.mark(index) is Mark.PROCEED:
            if passes.arrived == 1:
                passes.begin(actions, unreached)
            passes.launch(actions)


def test_buckets_become_ready_in_the_order_of_their_index_only() -> None:
    passes = Pass([[2, 3], [0], [1]], [1] * 4)
    passes.open()
    assert passes.mark(0) is Mark.PROCEED  # the first; bucket 1 is full but not bucket 0
    assert passes.mark(3) is Mark.ARRIVED
    assert passes.ready == 0
    assert passes.mark(2) is Mark.PROCEED
    assert passes.ready == 2
    assert passes.mark(1) is Mark.PROCEED
    assert passes.ready == 3


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.randoms())
def test_any_order_of_arrival_makes_all_buckets_ready(sizes, random) -> None:
    count = sum(sizes)
    shuffled = random.sample(range(count), count)
    members = [[shuffled.pop() for _ in range(size)] for size in sizes]
    expected = [random.randint(0, 3) for _ in range(count)]
    passes = Pass(members, expected)
    for _ in range(2):
        passes.open()
        skipped = {index for index in range(count) if random.random() < 0.2}
        passes.begin(Actions(passes), sorted(skipped))
        left = [0 if index in skipped else expected[index] for index in range(count)]
        arrivals = [index for index in range(count) for _ in range(left[index])]
        random.shuffle(arrivals)
        for index in arrivals:
            before = passes.ready
            mark = passes.mark(index)
            left[index] -= 1
            full = [not any(left[member] for member in bucket) for bucket in members]
            assert passes.ready <= (full.index(False) if False in full else len(full))
            assert mark == (Mark.PROCEED if passes.ready > before or passes.arrived == 1 else Mark.ARRIVED)
        if arrivals:
            assert passes.ready == len(members) or not any(
                expected[member] for bucket in members[passes.ready :] for member in bucket
            )
        assert passes.missing() == [index for index in sorted(skipped) if expected[index]]
        assert passes.counts() == [0 if index in skipped else expected[index] for index in range(count)]
        passes.close()


def test_a_gradient_that_comes_twice_is_noticed_and_those_that_do_not_come_are_listed() -> None:
    passes = Pass([[2, 1, 0]], [1] * 3)
    passes.open()
    assert passes.mark(1) is Mark.PROCEED
    assert passes.mark(1) is Mark.UNEXPECTED
    assert passes.missing() == [0, 2]
    assert passes.arrived == 1


def test_a_gradient_is_complete_when_it_came_as_often_as_expected() -> None:
    passes = Pass([[0, 1]], [2, 0])
    passes.open()
    assert passes.mark(0) is Mark.PROCEED
    assert passes.ready == 0
    assert passes.missing() == [0]
    assert passes.mark(0) is Mark.PROCEED
    assert passes.ready == 1
    assert passes.mark(1) is Mark.UNEXPECTED


def test_a_skipped_gradient_that_comes_after_all_counts_until_its_bucket_is_ready() -> None:
    passes = Pass([[0, 1], [2]], [1] * 3)
    passes.open()
    passes.begin(Actions(passes), [0, 2])
    assert passes.ready == 0
    assert passes.mark(0) is Mark.PROCEED
    assert passes.ready == 0
    assert passes.mark(1) is Mark.PROCEED
    assert passes.ready == 2
    assert passes.mark(2) is Mark.UNEXPECTED


def test_the_pass_that_is_learned_from_sends_nothing_before_its_end_and_shows_what_to_expect() -> None:
    passes = Pass([[0], [1], [2]], [1] * 3, learn=True)
    actions = Actions(passes)
    passes.open()
    assert [passes.mark(index) for index in (0, 1, 0)] == [Mark.PROCEED, Mark.ARRIVED, Mark.ARRIVED]
    passes.begin(actions, [])
    passes.launch(actions)
    assert not actions.calls
    assert passes.finish(actions) is PassEnd.WELL
    assert actions.used == [True, True, False]
    assert passes.expected == [2, 1, 0]
    assert passes.take_order() == [1, 0, 2]
    passes.rebuild([[1], [0], [2]], passes.expected)
    passes.open()
    assert [passes.mark(index) for index in (1, 0, 0)] == [Mark.PROCEED, Mark.ARRIVED, Mark.PROCEED]
    assert passes.ready == 3


def test_gradients_count_only_in_a_pass_and_the_first_one_opens_an_armed_pass() -> None:
    passes = Pass([[1, 0]], [1, 1])
    assert passes.mark(0) is Mark.IGNORED
    assert passes.arrived == 0
    passes.expect(True, 1)
    assert not passes.opened
    assert passes.mark(0) is Mark.PROCEED
    assert passes.opened
    passes.close()
    assert not passes.opened
    assert passes.mark(0) is Mark.IGNORED  # closing disarmed it
    passes.expect(True, 1)
    passes.ignore()
    assert passes.mark(0) is Mark.IGNORED


def test_a_pass_without_gradients_stays_armed() -> None:
    passes = Pass([[0]], [1])
    passes.expect(True, 1)
    passes.open()
    passes.close()
    assert passes.mark(0) is Mark.PROCEED


@pytest.mark.parametrize("buckets", [[[0], [0]], [[0, 2]], [[1]]])
def test_buckets_that_do_not_hold_every_parameter_once_are_refused(buckets: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every parameter once"):
        Pass(buckets, [1] * sum(map(len, buckets)))


def test_buckets_are_sent_as_they_become_ready_and_the_outcome_costs_no_message() -> None:
    passes = Pass([[2], [0, 1]], [1] * 3)
    actions = Actions(passes)
    passes.expect(True, 1)
    arrive(passes, actions, [1, 2])
    assert actions.calls == [("send", 0)]
    arrive(passes, actions, [0])
    assert passes.finish(actions) is PassEnd.WELL
    assert actions.calls[1:] == [("send", 1), ("wait", 0), ("wait", 1), ("wait", OUTCOME)]
    assert actions.used == [True] * 3
    assert passes.number == 1
    assert passes.take_order() == [1, 2, 0]
    assert passes.take_order() is None


def test_a_pass_without_gradients_is_none_and_the_expected_one_may_yet_come() -> None:
    passes = Pass([[0]], [1])
    actions = Actions(passes)
    passes.expect(True, 1)
    passes.open()
    assert passes.finish(actions) is PassEnd.NOTHING
    assert not actions.calls
    assert passes.number == 0
    arrive(passes, actions, [0])
    assert passes.finish(actions) is PassEnd.WELL


@pytest.mark.parametrize("separate", [False, True])
def test_missing_gradients_are_filled_sent_and_told_of(separate: bool) -> None:
    passes = Pass([[1], [0]], [1, 1])
    passes.separate = separate
    actions = Actions(passes)
    passes.expect(True, 1)
    arrive(passes, actions, [1])
    assert passes.finish(actions) is PassEnd.TROUBLE
    assert passes.missing() == [0]
    assert passes.number == 1
    assert actions.used is None
    assert actions.names("fill") == ([1] if separate else [OUTCOME, 1])
    assert actions.names("send") == ([0, 1, OUTCOME] if separate else [0, 1])


def test_a_shadow_gives_zeros_in_the_place_of_gradients_and_is_no_trouble() -> None:
    passes = Pass([[0], [1]], [1, 1])
    actions = Actions(passes)
    passes.open()
    passes.begin(actions, [])
    assert passes.finish(actions, shadow=True) is PassEnd.WELL
    assert actions.names("fill") == actions.names("send") == [0, 1]


def test_an_exception_that_ended_backward_is_told_to_the_others() -> None:
    passes = Pass([[0], [1]], [1, 1])
    actions = Actions(passes)
    passes.expect(True, 1)
    arrive(passes, actions, [0])
    assert passes.finish(actions, interrupted=True) is PassEnd.TROUBLE


def test_a_bucket_that_no_rank_needs_is_neither_sent_nor_waited_for() -> None:
    passes = Pass([[0], [1]], [1, 1], find_unused=True, fill_all=True)
    actions = Actions(passes, unneeded={1})
    passes.expect(True, 1)
    arrive(passes, actions, [0], unreached=[1])
    assert passes.finish(actions) is PassEnd.WELL
    assert actions.names("send") == actions.names("wait") == [0, OUTCOME]
    assert actions.used == [True, False]


def test_forward_passes_beyond_the_first_are_in_the_tail_before_its_bucket_is_sent() -> None:
    passes = Pass([[0]], [1])
    actions = Actions(passes)
    passes.expect(True, 1)
    passes.expect(True, 1)
    passes.expect(False, 1)  # not every rank runs this one
    arrive(passes, actions, [0])
    assert actions.calls == [("fill", OUTCOME), ("send", 0)]
    assert passes.tail() == [0, 1, 1]
    assert passes.finish(actions) is PassEnd.WELL
    passes.close()
    assert passes.extra == 0


@pytest.mark.parametrize("extras", [(0, 0), (1, 1), (0, 1), (2, 5), (15, 15), (14, 15)])
def test_ranks_that_ran_different_numbers_of_forward_passes_are_found_out(extras: tuple[int, int]) -> None:
    tails, flags = [], []
    for extra in extras:
        one = Pass([[0]], [1])
        for _ in range(1 + extra):
            one.expect(True, 1)
        tails.append(one.tail())
        flags.append(one.flags([False]))
    for separate in (False, True):
        passes = Pass([[0]], [1])
        passes.separate = separate
        actions = Actions(passes)

        def wait(bucket: int, passes: Pass = passes, separate: bool = separate) -> None:
            if bucket == OUTCOME and separate:
                passes.decode_flags([max(numbers) for numbers in zip(*flags, strict=True)])
            elif bucket == OUTCOME:
                passes.decode_tail([sum(numbers) / 2 for numbers in zip(*tails, strict=True)], 1e-7)

        actions.wait = wait  # type: ignore[method-assign]
        passes.open()
        arrive(passes, actions, [0])
        assert passes.finish(actions) == (PassEnd.WELL if extras[0] == extras[1] else PassEnd.TROUBLE)


def test_small_batches_that_occupy_some_of_the_copies_miss_nothing() -> None:
    passes = Pass([[0, 1]], [2, 2], copies=2)
    actions = Actions(passes)
    passes.expect(True, 1)
    arrive(passes, actions, [0, 1])
    assert passes.missing() == []
    assert passes.finish(actions) is PassEnd.WELL


def test_an_exception_of_an_action_leaves_the_pass_to_be_closed() -> None:
    passes = Pass([[0], [1]], [1, 1])
    actions = Actions(passes)

    def broken(bucket: int) -> None:
        raise ConnectionError(f"bucket {bucket}")

    passes.expect(True, 1)
    arrive(passes, actions, [0])
    actions.send = broken  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="bucket 1"):
        arrive(passes, actions, [1])
    with pytest.raises(ConnectionError, match="bucket 1"):
        passes.finish(actions)
    passes.close()
    assert not passes.opened
    assert passes.number == 0
