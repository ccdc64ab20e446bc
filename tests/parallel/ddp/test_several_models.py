"""Several wrapped models on one group, and several groups."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import shoal
from tests.parallel.models import (
    Batch,
    alone,
    assert_gradients,
    assert_same_parameters,
    batches,
    fixed,
    loss_of,
    mlp,
    on_ranks,
    part,
    sgd,
    wrapped,
)


def test_two_models_on_one_group_train_against_each_other() -> None:
    """The pattern of adversarial networks: gradients for one model flow through the other."""
    data = batches(4)

    def critic() -> nn.Module:
        return fixed(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())

    def play(maker: nn.Module, judge: nn.Module, some: Sequence[Batch]) -> None:
        making, judging = sgd(maker), sgd(judge)
        for noise, real in some:
            judging.zero_grad()
            made = maker(noise)
            ((judge(real) - 1) ** 2 + judge(made.detach()) ** 2).mean().backward()
            judging.step()
            making.zero_grad()
            ((judge(made) - 1) ** 2).mean().backward()
            making.step()

    def rank(group: shoal.ProcessGroup) -> tuple[nn.Module, nn.Module]:
        maker, judge = wrapped(group), wrapped(group, critic())
        play(maker, judge, [part(batch, group) for batch in data])
        return maker.module, judge.module

    pairs = on_ranks(2, rank)
    maker, judge = mlp(), critic()
    play(maker, judge, data)
    for pair in pairs:
        assert_same_parameters(pair[0], maker)
        assert_same_parameters(pair[1], judge)


def test_two_models_in_one_backward_pass_are_both_reduced() -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        one, two = wrapped(group), wrapped(group)
        for batch in data:
            one.zero_grad()
            two.zero_grad()
            (loss_of(one, part(batch, group)) + 2 * loss_of(two, part(batch, group))).backward()
            assert_gradients(one, alone(batch))
            assert_gradients(two, alone(batch, factor=2))

    on_ranks(2, rank)


def test_models_of_one_rank_may_belong_to_different_groups() -> None:
    (batch,) = batches(1)

    def rank(group: shoal.ProcessGroup) -> None:
        with group.split(group.rank % 2) as pair:
            inner, outer = wrapped(pair), wrapped(group)
            for _ in range(2):
                inner.zero_grad()
                outer.zero_grad()
                (loss_of(inner, part(batch, pair)) + loss_of(outer, part(batch, group))).backward()
                assert_gradients(inner, alone(batch))
                assert_gradients(outer, alone(batch))

    on_ranks(4, rank)


def test_one_module_may_be_trained_in_two_groups_in_turn() -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        with group.split(group.rank % 2) as pair:
            module = mlp()
            in_pair, in_all = wrapped(pair, module), wrapped(group, module)
            for batch in data:
                module.zero_grad()
                loss_of(in_pair, part(batch, pair)).backward()
                assert_gradients(module, alone(batch))
                loss_of(in_all, part(batch, group)).backward()
                assert_gradients(module, alone(batch, batch))

    on_ranks(4, rank)
