"""PowerSGD: exact at full rank, right in the long run at low rank, and the same on all ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import shoal
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.training import on_ranks, pairwise

from .buckets import SHAPES, Model, count_sent, gradient, norm, same_on_all

HOOKS = [hooks.powerSGD_hook, hooks.batched_powerSGD_hook]
SETTINGS = {"batch_tensors_with_same_shape": True, "use_error_feedback": False, "warm_start": False}
BOTH = pytest.mark.parametrize("hook", HOOKS)


def state_of(**settings: Any) -> hooks.PowerSGDState:
    return hooks.PowerSGDState(**{"start_powerSGD_iter": 0, "min_compression_rate": 0.1, **settings})


@pairwise(size=[1, 2, 3, 4], warm=[True, False], hook=HOOKS)
def test_at_full_rank_it_is_the_all_reduce(hook: Any, size: int, warm: bool) -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, count=2, dtype=torch.float64)
        state = state_of(matrix_approximation_rank=64, min_compression_rate=0.001, warm_start=warm)
        return [(model.reduce(hook, state), model.mean()) for _ in range(3)]

    results = run_threads(rank, size)
    for step in range(3):
        averaged = same_on_all([steps[step][0] for steps in results])
        for own, mean in zip(averaged, results[0][step][1], strict=True):
            torch.testing.assert_close(own, mean, rtol=1e-9, atol=1e-9)


@pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    settings=[{}, *({name: value} for name, value in SETTINGS.items())],
    hook=HOOKS,
)
def test_all_ranks_have_bitwise_the_same_gradients(hook: Any, settings: Any, dtype: torch.dtype) -> None:
    shapes = [*SHAPES, SHAPES[0], SHAPES[2], SHAPES[0]]

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, count=3, shapes=shapes, dtype=dtype)
        state = state_of(matrix_approximation_rank=2, **settings)
        return [own for _ in range(4) for own in model.reduce(hook, state)]

    averaged = same_on_all(run_threads(rank, 3))
    assert all(bool(own.isfinite().all()) for own in averaged)


@on_ranks(3)
def test_several_buckets_are_reduced_as_each_would_be_alone(group: shoal.ProcessGroup) -> None:
    """Their messages are matched, whichever callback of which rank comes first."""
    together = Model(group, count=4)
    state = state_of()
    results = [together.reduce(hooks.powerSGD_hook, state) for _ in range(3)]
    alone = Model(group, count=4)
    state = state_of()
    for step in range(3):
        alone.compute()
        for bucket in alone.buckets:
            hooks.powerSGD_hook(state, bucket).wait()
        own = [view.to(torch.float64, copy=True) for bucket in alone.buckets for view in bucket.gradients()]
        assert all(torch.equal(a, b) for a, b in zip(own, results[step], strict=True))


@on_ranks(2)
def test_matrices_of_equal_shape_computed_together_give_the_same(group: shoal.ProcessGroup) -> None:
    shapes = [(24, 40), (7,), (24, 40), (24, 40)]
    results = []
    for batched in (False, True):
        model = Model(group, shapes=shapes, dtype=torch.float64)
        state = state_of(batch_tensors_with_same_shape=batched)
        results.append([own for _ in range(4) for own in model.reduce(hooks.powerSGD_hook, state)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_one_step_is_a_power_iteration_on_the_mean() -> None:
    """Against the formula, in double precision: M' = P P^T M with P an orthonormal basis of M Q."""

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, shapes=[(24, 40)], dtype=torch.float64)
        state = state_of(matrix_approximation_rank=3)
        (first,) = model.reduce(hooks.powerSGD_hook, state)
        (factor,) = state.factors.values()
        (mean,) = model.mean()
        (second,) = model.reduce(hooks.powerSGD_hook, state)
        return first, factor, mean, second, model.mean()[0]

    first, factor, mean, second, next_mean = run_threads(rank, 2)[0]
    assert torch.linalg.matrix_rank(first) == 3
    # Warm start: Q of the first step, applied to what is now to be approximated, the lost part included.
    target = next_mean + (mean - first)
    p, _ = torch.linalg.qr(target @ factor.mT)
    torch.testing.assert_close(second, p @ p.mT @ target, rtol=1e-9, atol=1e-9)


@BOTH
def test_with_error_feedback_nothing_is_lost_for_good(hook: Any) -> None:
    """What all steps gave together differs from the sum of the means by the errors of the last step only."""

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, dtype=torch.float64)
        state = state_of(matrix_approximation_rank=2)
        given = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters]
        wanted = [torch.zeros_like(total) for total in given]
        for _ in range(30):
            torch._foreach_add_(given, model.reduce(hook, state))
            torch._foreach_add_(wanted, model.mean())
        lost = [torch.zeros(p.numel(), dtype=torch.float64) for p in model.parameters]
        for index, error in state.errors.items():
            group.all_reduce(error, "avg").wait()
            lost[index] = error
        return given, wanted, lost

    given, wanted, lost = run_threads(rank, 2)[0]
    missing = [a - b for a, b in zip(wanted, given, strict=True)]
    assert norm(missing) == pytest.approx(norm(lost), rel=1e-6)
    for index in (0, 2):  # the matrices; other memory layouts keep errors in their own order
        torch.testing.assert_close(missing[index].flatten(), lost[index], rtol=1e-7, atol=1e-7)
    assert norm(missing) < 3 * norm(wanted)


def test_equal_gradients_in_every_step_are_learnt_wholly() -> None:
    def constant(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        return gradient(rank, 0, index, shape)

    def rank(group: shoal.ProcessGroup) -> Any:
        errors = []
        for feedback in (True, False):
            model = Model(group, gradients=constant)
            state = state_of(matrix_approximation_rank=2, use_error_feedback=feedback)
            total = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters]
            for _ in range(60):
                torch._foreach_add_(total, model.reduce(hooks.powerSGD_hook, state))
            missing = [a / 60 - b for a, b in zip(total, model.mean(), strict=True)]
            errors.append(norm(missing) / norm(model.mean()))
        return errors

    with_feedback, without = run_threads(rank, 2)[0]
    assert with_feedback < 0.2
    assert without > 0.5


@BOTH
def test_less_is_sent_and_the_state_says_how_much(hook: Any) -> None:
    shapes = [(64, 64), (64,), (128, 32)]

    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group, shapes=shapes, gap=0)
        state = state_of(start_powerSGD_iter=1, min_compression_rate=2)
        sent = count_sent(group)
        model.reduce(hook, state)
        assert state.compression_stats() == (0.0, 0, 0)
        assert sent == [64 * 64 + 64 + 128 * 32]
        sent.clear()
        model.reduce(hook, state)
        return sum(sent), len(sent), state.compression_stats()

    for count, messages, (rate, before, after) in run_threads(rank, 2):
        assert messages == 2
        assert (before, after) == (64 * 64 + 64 + 128 * 32, count)
        assert rate == before / after
        expected = 2 * 64 + 64 + (128 + 32) if hook is hooks.powerSGD_hook else 2 * 91
        assert count == expected


def test_what_would_not_get_smaller_goes_as_it_is() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        model = Model(group)
        state = state_of(min_compression_rate=100)
        return model.reduce(hooks.powerSGD_hook, state), model.mean(), state.compression_stats()[0]

    for own, mean, rate in run_threads(rank, 2):
        assert rate == 1
        for a, b in zip(own, mean, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@BOTH
@on_ranks(2)
def test_a_pickled_state_goes_on_where_it_was(group: shoal.ProcessGroup, hook: Any) -> None:
    model = Model(group, count=2)
    state = hooks.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
    for _ in range(5):
        model.reduce(hook, state)
    saved = pickle.dumps(state)
    expected = [own for _ in range(3) for own in model.reduce(hook, state)]
    resumed = pickle.loads(saved)
    assert resumed.process_group is None
    assert resumed.iter == 5
    again = Model(group, count=2)
    again.step = 4
    own = [own for _ in range(3) for own in again.reduce(hook, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    assert resumed.compression_stats() == state.compression_stats()


@on_ranks(2)
def test_buckets_may_be_made_anew_between_steps(group: shoal.ProcessGroup) -> None:
    """What is remembered belongs to parameters: those of two buckets may meet in one."""
    results = []
    for regroup in (False, True):
        model = Model(group, count=2, dtype=torch.float64)
        state = state_of()
        own = model.reduce(hooks.powerSGD_hook, state)
        if regroup:
            step, model = model.step, Model(group, count=1, shapes=SHAPES * 2, dtype=torch.float64)
            model.step = step
        for _ in range(3):
            own = model.reduce(hooks.powerSGD_hook, state)
        results.append(own)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@BOTH
@on_ranks(2)
def test_gradients_of_zeros_are_no_trouble_and_compression_recovers(
    group: shoal.ProcessGroup, hook: Any
) -> None:
    def sometimes(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        return gradient(rank, step, index, shape) * (step >= 2)

    for rank_of_factors, epsilon in ((1, 0), (1, 1e-8), (3, 0), (3, 1e-8)):
        model = Model(group, gradients=sometimes)
        state = state_of(matrix_approximation_rank=rank_of_factors, orthogonalization_epsilon=epsilon)
        for _ in range(2):
            assert norm(model.reduce(hook, state)) == 0
        assert norm(model.reduce(hook, state)) > 0.1 * norm(model.mean())


@pytest.mark.parametrize(("hook", "bad"), [*zip(HOOKS, [float("nan"), float("inf")], strict=True)])
@on_ranks(2)
def test_a_step_that_overflows_is_seen_by_all_and_forgotten(
    group: shoal.ProcessGroup, hook: Any, bad: float
) -> None:
    def broken(rank: int, step: int, index: int, shape: torch.Size) -> torch.Tensor:
        x = gradient(rank, step, index, shape)
        if rank == 1 and step == 2 and index == 0:
            x[3, 4] = bad
        return x

    model = Model(group, gradients=broken)
    state = state_of()
    for step in range(5):
        before = pickle.dumps((state.errors, state.factors, state.bucket_factors))
        sound = all(bool(own.isfinite().all()) for own in model.reduce(hook, state))
        assert sound == (step != 2)
        if not sound:
            assert pickle.dumps((state.errors, state.factors, state.bucket_factors)) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"matrix_approximation_rank": 0},
            "matrix_approximation_rank must be an integer of at least 1, got 0",
        ),
        ({"start_powerSGD_iter": -1}, "start_powerSGD_iter must be an integer of at least 0, got -1"),
        ({"min_compression_rate": 0}, "min_compression_rate must be positive, got 0"),
        ({"orthogonalization_epsilon": -1}, "orthogonalization_epsilon must not be negative, got -1"),
        ({"process_group": "mine"}, "process_group must be a ProcessGroup or None, got str"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(shoal.UsageError, match=message):
        hooks.PowerSGDState(**settings)
