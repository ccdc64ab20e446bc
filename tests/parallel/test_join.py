"""Join with joinables of one's own: who communicates, who shadows, and how it ends."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import Join, Joinable, JoinHook
from shoal.errors import GroupAborted, UnevenInputs, UnusedParameterError, UsageError
from shoal.parallel.join import JoinConfig
from shoal.testing import run_threads
from tests.parallel.training import on_ranks


class Counter(Joinable):
    """Sums ``value`` over the ranks that are active, in every call, and keeps a log of what happened."""

    def __init__(self, group: shoal.ProcessGroup, value: int = 1, log: list[Any] | None = None) -> None:
        super().__init__()
        self.group, self.value = group, value
        self.total = 0
        self.active: list[int] = []
        self.log: list[Any] = [] if log is None else log
        self.kwargs: list[dict[str, Any]] = []

    def __call__(self) -> None:
        notified = Join.notify_join_context(self)
        if notified is not None:
            self.active.append(int(notified.wait()))
        self.total += int(self.group.all_reduce(torch.tensor(self.value)).wait())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.kwargs.append(kwargs)
        return CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> shoal.ProcessGroup:
        return self.group


class CounterHook(JoinHook):
    """Adds nothing to the sums of the others; at last everybody gets the longest run's total."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.log.append(("main", self.counter.value))
        self.counter.group.all_reduce(torch.tensor(0)).wait()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.log.append(("post", is_last_joiner))
        total = torch.tensor(self.counter.total if is_last_joiner else 0)
        self.counter.total = int(self.counter.group.all_reduce(total, op="max").wait())


def _steps(counter: Counter, count: int) -> None:
    for _ in range(count):
        counter()


def _count(counter: Counter, batches: int, **options: Any) -> Counter:
    with Join([counter], **options):
        _steps(counter, batches)
    return counter


@pytest.mark.parametrize("batches", [(3, 5), (5, 5), (0, 0), (2, 7, 1), (0, 1, 2, 3), (4, 0, 4, 1)])
def test_a_counter_counts_all_batches_of_all_ranks(batches: tuple[int, ...]) -> None:
    longest = max(batches)

    @on_ranks(len(batches))
    def counting(group: shoal.ProcessGroup) -> None:
        count = batches[group.rank]
        counter = _count(Counter(group), count)
        assert counter.total == sum(batches)
        assert counter.active == [sum(other > step for other in batches) for step in range(count)]
        assert counter.log == [("main", 1)] * (longest - count) + [("post", count == longest)]

    counting()


@on_ranks(2)
def test_all_joinables_shadow_in_order_and_only_the_first_one_speaks(group: shoal.ProcessGroup) -> None:
    log: list[Any] = []
    counters = [Counter(group, value, log) for value in (1, 10, 100)]
    with Join(counters):
        for _ in range(1 + 2 * group.rank):
            for counter in counters:
                counter()
    assert [counter.total for counter in counters] == [4, 40, 400]
    assert [len(counter.active) for counter in counters] == [1 + 2 * group.rank, 0, 0]
    shadowed = [("main", value) for _ in range(2) for value in (1, 10, 100)] if group.rank == 0 else []
    assert log == [*shadowed, *[("post", group.rank == 1)] * 3]


@on_ranks(2)
def test_every_hook_gets_all_keyword_arguments(group: shoal.ProcessGroup) -> None:
    counters = [Counter(group), Counter(group)]
    given = {"divide_by_initial_world_size": False, "flavour": "plain"}
    with Join(counters, **given):
        pass
    assert [counter.kwargs for counter in counters] == [[given], [given]]


def test_a_join_can_be_used_again_and_nested_in_that_of_another_group() -> None:
    def rank(group: shoal.ProcessGroup) -> tuple[int, int]:
        half = group.split(color=group.rank % 2)
        outer, inner = Counter(group), Counter(half)
        join = Join([inner])
        with Join([outer]):
            _steps(outer, 2)
            for _ in range(3):
                with join:
                    _steps(inner, 1 + group.rank)
                outer()
        half.close()
        return outer.total, inner.total

    # Ranks 0 and 2 are one half, 1 and 3 the other: (1 + 3) and (2 + 4) batches, three times.
    assert run_threads(rank, 4) == [(20, 12), (20, 18)] * 2


@on_ranks(2)
def test_without_uneven_inputs_a_disabled_join_does_nothing(group: shoal.ProcessGroup) -> None:
    counter = Counter(group)
    with Join([counter], enable=False, anything="goes"):
        for _ in range(3):
            counter()
            assert not counter._join_config.enable
    assert (counter.total, counter.active, counter.log, counter.kwargs) == (6, [], [], [])


@pytest.mark.parametrize("throw", [False, True])
@on_ranks(1)
def test_a_group_of_one_notifies_nobody_and_is_the_last_joiner(
    group: shoal.ProcessGroup, throw: bool
) -> None:
    counter = _count(Counter(group), 3, throw_on_early_termination=throw)
    assert (counter.total, counter.active, counter.log) == (3, [], [("post", True)])


@on_ranks(2)
def test_outside_of_a_join_there_is_nothing_to_say(group: shoal.ProcessGroup) -> None:
    counter = _count(Counter(group), 1)
    counter()  # would find no partner for its notice
    assert len(counter.active) == 1


# -- ending with the first rank ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "named"),
    [((2, 5, 5), "rank 0 of group"), ((5, 1, 1), "ranks 1, 2 of group"), ((1, 0, 3), "rank 1 of group")],
)
@on_ranks(3)
def test_every_rank_is_told_which_ranks_ran_out_first(
    group: shoal.ProcessGroup, batches: tuple[int, ...], named: str
) -> None:
    counter = Counter(group)
    with pytest.raises(UnevenInputs, match=f"^{named}.*seen by rank {group.rank}") as caught:
        _count(counter, batches[group.rank], throw_on_early_termination=True)
    assert caught.value.ranks == tuple(r for r, count in enumerate(batches) if count == min(batches))
    assert counter.log == []  # neither shadowed nor ended well
    assert counter.active == [3] * min(batches)
    group.barrier().wait()  # the group is as good as before
    _count(counter, 1)


@on_ranks(3)
def test_even_inputs_end_well_also_when_told_to_raise(group: shoal.ProcessGroup) -> None:
    counter = _count(Counter(group), 3, throw_on_early_termination=True)
    assert (counter.total, counter.active, counter.log) == (9, [3, 3, 3], [("post", True)])


# -- exceptions ----------------------------------------------------------------------------------


class Mistake(Exception):
    pass


def _outcome(counter: Counter, body: Callable[[], None]) -> tuple[BaseException | None, str]:
    """What ``body`` raises within a Join, and the state of the group after it."""
    try:
        with Join([counter]):
            body()
    except BaseException as raised:
        assert not counter._join_config.enable
        return raised, counter.group.state
    return None, counter.group.state


def test_an_exception_in_the_block_is_told_to_the_others_who_do_not_wait() -> None:
    def rank(group: shoal.ProcessGroup) -> tuple[BaseException | None, str]:
        def body() -> None:
            for _ in range(group.rank):  # rank 0 has none left, and shadows
                counter()
                if group.rank == 1:
                    raise Mistake("in the middle of an epoch")

        counter = Counter(group)
        return _outcome(counter, body)

    shadow, mistaken, active = run_threads(rank, 3)
    assert isinstance(mistaken[0], Mistake)
    for error, _ in (shadow, active):
        assert isinstance(error, GroupAborted)
        assert "left the block of a Join on rank 1: Mistake('in the middle of an epoch')" in str(error)


@pytest.mark.parametrize("place", ["main_hook", "post_hook"])
def test_an_exception_in_a_hook_is_told_to_the_others(place: str) -> None:
    def rank(group: shoal.ProcessGroup) -> tuple[BaseException | None, str]:
        def spoiled(*_: Any) -> None:
            raise Mistake(place)

        def hook(**_: Any) -> JoinHook:
            made = CounterHook(counter)
            if group.rank == 0:
                setattr(made, place, spoiled)
            return made

        counter = Counter(group)
        counter.join_hook = hook  # type: ignore[method-assign]
        return _outcome(counter, lambda: _steps(counter, group.rank))

    spoiled, active = run_threads(rank, 2)
    assert isinstance(spoiled[0], Mistake)
    assert isinstance(active[0], GroupAborted)
    assert f"on rank 0: Mistake('{place}')" in str(active[0])


@pytest.mark.parametrize(
    "error", [UnusedParameterError("as on all ranks"), SystemExit(0)], ids=lambda error: type(error).__name__
)
@on_ranks(2)
def test_what_all_ranks_raise_together_leaves_the_group_usable(
    group: shoal.ProcessGroup, error: BaseException
) -> None:
    def body() -> None:
        counter()
        raise error

    counter = Counter(group)
    assert _outcome(counter, body) == (error, "open")
    group.barrier().wait()


# -- mistakes in the call --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda group, other: [], "at least one joinable, got none"),
        (
            lambda group, other: [nn.Linear(1, 1)],
            "expected a shoal.Joinable, got torch.nn.modules.linear.Linear",
        ),
        (lambda group, other: [Counter(group)] * 2, "joinable 1 of the Join, Counter, is named twice"),
        (
            lambda group, other: [Counter(group), Counter(other)],
            "must share one group: Counter has <ProcessGroup 'world': rank 0 of 1, open>, but Counter has",
        ),
    ],
)
@on_ranks(1)
def test_wrong_joinables_are_refused(
    group: shoal.ProcessGroup, make: Callable[..., Any], message: str
) -> None:
    with group.split(color=0) as other, pytest.raises(UsageError, match=message):
        Join(make(group, other))


@on_ranks(1)
def test_a_class_that_did_not_call_the_constructor_of_joinable_is_named(group: shoal.ProcessGroup) -> None:
    class Forgetful(nn.Module, Joinable):
        def __init__(self, group: shoal.ProcessGroup) -> None:
            super().__init__()
            self.join_hook = lambda **_: JoinHook()  # type: ignore[method-assign]

        def join_hook(self, **kwargs: Any) -> JoinHook:
            return JoinHook()

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: None)

    for use in (Join.notify_join_context, lambda joinable: Join([joinable])):
        with pytest.raises(UsageError, match=r"Forgetful.*call Joinable.__init__\(self\)"):
            use(Forgetful(group))


def test_a_joinable_is_in_one_join_at_a_time() -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        first, second = Counter(group), Counter(group)
        with Join([first]):
            with pytest.raises(UsageError, match="Counter is inside another Join already"):
                Join([second, first]).__enter__()
            assert not second._join_config.enable
            with Join([first], enable=False):
                first()
        return first.total

    assert run_threads(rank, 2) == [2, 2]


@pytest.mark.parametrize("throw", [False, True])
@pytest.mark.parametrize("shadows", [False, True])
def test_a_nested_join_of_the_same_group_is_refused_on_all_ranks(throw: bool, shadows: bool) -> None:
    def rank(group: shoal.ProcessGroup) -> str:
        outer, inner = Counter(group), Counter(group)

        def enter() -> None:
            with Join([outer], throw_on_early_termination=throw):
                if not (shadows and group.rank == 1):
                    Join([inner]).__enter__()

        with pytest.raises(UsageError, match=r"Join .*inside the block of") as raised:
            enter()
        assert group.join_block is None
        group.barrier().wait()
        assert _count(outer, 2).total > 0  # both can be used again
        return str(raised.value)

    for number, text in enumerate(run_threads(rank, 3)):
        assert ("other ranks of group" in text) == (shadows and number == 1)


def test_a_nested_join_aborts_the_group_if_another_rank_is_in_a_step() -> None:
    def rank(group: shoal.ProcessGroup) -> tuple[BaseException | None, str]:
        def body() -> None:
            if group.rank == 0:
                Join([Counter(group)]).__enter__()
            counter()

        counter = Counter(group)
        return _outcome(counter, body)

    (refused, _), (other, _) = run_threads(rank, 2)
    assert isinstance(refused, UsageError)
    assert isinstance(other, GroupAborted)
    assert "inside the block of another Join" in str(other)


@on_ranks(2)
def test_a_keyword_that_no_joinable_takes_is_refused(group: shoal.ProcessGroup) -> None:
    net = nn.Linear(2, 2)
    model = shoal.DistributedDataParallel(net, group=group)
    optimizer = shoal.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, group=group, lr=0.1)

    class Named(Counter):
        def join_hook(self, weight: int = 1) -> JoinHook:  # type: ignore[override]
            return CounterHook(self)

    words = (
        "Join takes no argument 'divide_by_initial_world_sizee' "
        r"\(did you mean 'divide_by_initial_world_size'\?\)"
    )
    with pytest.raises(UsageError, match=words):
        Join([model, optimizer], divide_by_initial_world_sizee=False)
    with pytest.raises(UsageError, match="'is_first_joinable': the first one of joinables represents all"):
        Join([model], is_first_joinable=True)
    with pytest.raises(UsageError, match=r"'weigth' \(did you mean 'weight'\?\)"):
        Join([model, Named(group)], weigth=2)
    for join in (
        Join([model, Named(group)], weight=2, divide_by_initial_world_size=False),
        Join([model, Counter(group)], of_its_own=1),  # a hook of the program takes any
    ):
        with join:
            pass


@on_ranks(2)
def test_what_is_no_hook_is_refused_before_anything_is_sent(group: shoal.ProcessGroup) -> None:
    counter = Counter(group)
    counter.join_hook = lambda **_: print  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(UsageError, match="join_hook of Counter must return a JoinHook, got builtin"):
        Join([counter]).__enter__()
    group.barrier().wait()


# -- saving, and warnings ----------------------------------------------------------------------------


class Model(nn.Linear, Joinable):
    group: shoal.ProcessGroup  # of the class, because a group cannot be copied

    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)
        Joinable.__init__(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return self.weight.device

    @property
    def join_process_group(self) -> shoal.ProcessGroup:
        return self.group


@pytest.mark.parametrize("duplicate", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
@on_ranks(1)
def test_saving_within_a_join_warns_and_forgets_the_join(
    group: shoal.ProcessGroup, duplicate: Callable[[Model], Model]
) -> None:
    Model.group = group
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outside = duplicate(model)
    with Join([model]):
        with pytest.warns(UserWarning, match="saved or copied inside an active Join"):
            inside = duplicate(model)
        assert model._join_config.enable
        weights = model.state_dict()  # the better way, of which nobody needs to be warned
    for saved in (outside, inside):
        assert saved._join_config == JoinConfig(False, False, False)
        assert torch.equal(saved.weight, weights["weight"])
        assert Join.notify_join_context(saved) is None
    del Model.group


def test_a_rank_that_shadows_more_than_a_thousand_steps_warns_once() -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        return _count(Counter(group), 1010 * group.rank).total

    with pytest.warns(UserWarning, match="rank 0 has at least 1000 fewer inputs") as caught:
        assert run_threads(rank, 2) == [1010, 1010]
    assert len(caught) == 1
    assert caught[0].filename == __file__
