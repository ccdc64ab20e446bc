"""The module wrapper: how it looks from outside, when it communicates, and what it does with buffers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.parallel import hooks
from shoal.testing import run_threads
from tests.parallel.models import batches, fixed, loss_of, mlp, part
from tests.parallel.training import assert_close, on_ranks, train, values, wrapped


@on_ranks(3)
def test_all_ranks_start_with_the_parameters_and_buffers_of_rank_0(group: shoal.ProcessGroup) -> None:
    class Everything(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 2), float(rank)))
            self.frozen = nn.Parameter(
                torch.full((5,), float(rank), dtype=torch.bfloat16), requires_grad=False
            )
            self.register_buffer("count", torch.tensor(rank))
            self.register_buffer("flags", torch.tensor([rank == 0, False]), persistent=False)
            self.register_buffer("waves", torch.full((2,), rank + 1j * rank))
            self.register_buffer("nothing", torch.empty(0))
            self.register_buffer("absent", None)

    model = wrapped(group, Everything(group.rank)).module
    assert model.weight.tolist() == [[0.0, 0.0]] * 3
    assert model.frozen.tolist() == [0.0] * 5
    assert model.count.item() == 0
    assert model.flags.tolist() == [True, False]
    assert model.waves.tolist() == [0j, 0j]


@on_ranks(1)
def test_the_state_is_that_of_the_module_with_a_prefix(group: shoal.ProcessGroup) -> None:
    inner = mlp()
    model = wrapped(group, inner)
    assert model.module is inner
    assert list(model.state_dict()) == [f"module.{name}" for name in inner.state_dict()]
    model.load_state_dict(model.state_dict())
    assert not model.eval().module.training
    assert model.train().module.training


@on_ranks(2)
def test_arguments_and_outputs_pass_through(group: shoal.ProcessGroup) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *more: int, flag: bool) -> dict[str, object]:
            return {"out": [self.layer(x)], "more": more, "flag": flag}

    model = wrapped(group, Picky())
    result = model(torch.ones(1, 2), 3, 4, flag=True)
    assert result["more"] == (3, 4)
    assert result["flag"] is True
    result["out"][0].sum().backward()
    assert model.module.layer.bias.grad.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_a_rank_may_run_forward_alone_where_nothing_is_synchronised(group: shoal.ProcessGroup) -> None:
    inner = nn.Sequential(mlp(), nn.BatchNorm1d(3, dtype=torch.float64))
    model = wrapped(group, inner)
    batch = part(batches(1)[0], group)
    if group.rank == 1:  # each would hang if it communicated
        with torch.no_grad():
            model(batch[0])
        with torch.inference_mode():
            model(batch[0])
        with model.no_sync():
            loss_of(model, batch).backward()
        model.eval()
        model(batch[0])
        model.train()
    loss_of(model, batch).backward()


@on_ranks(2)
def test_within_no_sync_gradients_stay_local_until_the_next_synchronised_backward(
    group: shoal.ProcessGroup,
) -> None:
    model = wrapped(group, nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), float(group.rank + 1))
    with model.no_sync():
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        assert model.module.weight.grad.item() == 2 * (group.rank + 1)
    model(x).sum().backward()
    assert model.module.weight.grad.item() == 4.5  # the mean of 3 and 6


@on_ranks(2)
def test_a_no_sync_block_that_raises_ends(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, nn.Linear(1, 1, bias=False))
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    model(torch.full((1, 1), float(group.rank))).sum().backward()
    assert model.module.weight.grad.item() == 0.5


def _batch_normed() -> nn.Module:
    return fixed(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())


@pytest.mark.parametrize("broadcast_buffers", [True, None, False])
def test_every_step_starts_with_the_buffers_of_rank_0(broadcast_buffers: bool | None) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        model = wrapped(group, _batch_normed(), broadcast_buffers=broadcast_buffers)
        seen = []
        norm = model.module[1]
        norm.register_forward_pre_hook(lambda *_: seen.append(norm.running_mean.clone()))
        for batch in data:
            loss_of(model, part(batch, group)).backward()
        return seen[-1], norm.running_mean

    (before, after), (other_before, other_after) = run_threads(rank, 2)
    assert torch.equal(before, other_before) == (broadcast_buffers is not False)
    assert not torch.equal(after, other_after)  # each rank's own part of the batch went in


@on_ranks(2)
def test_two_forward_passes_through_batch_norm_before_backward_work(group: shoal.ProcessGroup) -> None:
    """Overwriting buffers between them would make autograd refuse to go back through the first."""
    model = wrapped(group, _batch_normed())
    for one, two in (batches(2), batches(2)):
        (loss_of(model, part(one, group)) + loss_of(model, part(two, group))).backward()


def test_buffers_that_the_module_replaces_are_followed() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + x.detach().sum()
            return self.layer(x)

    def rank(group: shoal.ProcessGroup) -> float:
        model = wrapped(group, Replacing())
        for _ in range(3):
            model(torch.full((1, 1), 10.0**group.rank)).sum().backward()
        return model.module.seen.item()

    assert run_threads(rank, 2) == [3.0, 12.0]


@on_ranks(2)
def test_frozen_parameters_are_not_reduced(group: shoal.ProcessGroup) -> None:
    inner = mlp()
    inner[0].requires_grad_(False)
    model = wrapped(group, inner)
    loss_of(model, part(batches(1)[0], group)).backward()
    assert inner[0].weight.grad is None
    assert sum(len(bucket.members) for bucket in model._reducer.buckets) == 7


@pytest.mark.parametrize("cap", [0, -1])
@on_ranks(1)
def test_a_bucket_cap_that_is_not_positive_is_refused(group: shoal.ProcessGroup, cap: float) -> None:
    with pytest.raises(UsageError, match=f"bucket_cap_mb must be positive, got {cap}"):
        wrapped(group, bucket_cap_mb=cap)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (nn.ReLU(), "no parameter of ReLU requires a gradient"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter of Linear requires a gradient"),
        (nn.LazyLinear(3), "parameter 'weight' has no shape yet; run a forward pass"),
    ],
)
@on_ranks(2)
def test_modules_that_cannot_be_trained_are_refused(
    group: shoal.ProcessGroup, module: nn.Module, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        wrapped(group, module)


@on_ranks(2)
def test_a_copy_computes_and_says_that_it_belongs_to_no_group_when_it_is_trained(
    group: shoal.ProcessGroup,
) -> None:
    x = torch.ones(1, 6, dtype=torch.float64)
    module = fixed(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double())
    model = wrapped(group, module)
    model(x).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(other(x), model(x))
        with pytest.raises(UsageError, match="belongs to no group"):
            other(x)
        again = wrapped(group, other.module)
        again(x).sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layers: layers[0].bias.requires_grad_(),
            r"'0\.bias' was frozen when it was wrapped and requires a gradient now",
        ),
        (
            lambda layers: setattr(layers[2], "weight", nn.Parameter(torch.zeros(2, 3))),
            r"'2\.weight' was replaced",
        ),
        (lambda layers: setattr(layers[2], "bias", None), r"'2\.bias' was removed from the module"),
        (lambda layers: setattr(layers[2], "scale", nn.Parameter(torch.ones(1))), r"'2\.scale' was added"),
        (lambda layers: layers.append(nn.Linear(2, 2)), r"'3\.weight' was added"),
        (
            lambda layers: layers[2].double(),
            r"'2\.weight' was torch\.float32 when it was wrapped and is torch\.float64 now",
        ),
    ],
)
@on_ranks(2)
def test_a_model_that_changed_after_wrapping_is_named(
    group: shoal.ProcessGroup, change: Callable[[nn.Module], None], message: str
) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    module[0].bias.requires_grad_(False)
    model = wrapped(group, module)
    model(torch.ones(1, 4)).sum().backward()
    change(module)
    where = f"on rank {group.rank} changed after it was wrapped .*: parameter "
    with pytest.raises(UsageError, match=f"{where}{message}; wrap the module again"):
        model(torch.ones(1, 4))


@on_ranks(2)
def test_other_changes_of_the_model_are_no_matter(group: shoal.ProcessGroup) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model = wrapped(group, module)
    for layer in (nn.ReLU(), nn.Sigmoid()):
        module[1] = layer
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(1)
def test_a_model_within_a_wrapped_model_is_refused(group: shoal.ProcessGroup) -> None:
    inner = wrapped(group, nn.Linear(4, 3))
    for module, where in ((inner, ""), (nn.Sequential(nn.Tanh(), inner), ", '1'")):
        with pytest.raises(UsageError, match=f"holds a DistributedDataParallel already{where}: two"):
            wrapped(group, module)


@on_ranks(2)
def test_parameters_that_are_reduced_late_have_buckets_of_their_own(group: shoal.ProcessGroup) -> None:
    data = batches(3)
    module = mlp()
    named = dict(module.named_parameters())
    late = [(name, named[name]) for name in ("7.weight", "7.bias")]
    with pytest.raises(UsageError, match="belong together"):
        wrapped(group, module, delay_all_reduce_named_params=late)
    model = wrapped(
        group, module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=named["3.weight"]
    )
    train(model, [part(batch, group) for batch in data])
    names = list(named)
    buckets = [{names[index] for index in bucket.members} for bucket in model._reducer.buckets]
    assert {"7.weight", "7.bias"} in buckets
    buckets.remove({"7.weight", "7.bias"})
    assert any("3.weight" in bucket for bucket in buckets)
    assert_close(values(module), values(train(mlp(), data)))


@on_ranks(1)
def test_a_group_has_both_names_and_arguments_of_torch_alone_get_advice(group: shoal.ProcessGroup) -> None:
    state, sgd = hooks.PowerSGDState, torch.optim.SGD
    assert shoal.DistributedDataParallel(mlp(), process_group=group).group is group
    assert shoal.ZeroRedundancyOptimizer(mlp().parameters(), sgd, process_group=group, lr=1).group is group
    assert shoal.PeriodicModelAverager(2, process_group=group).group is group
    assert shoal.HierarchicalModelAverager({2: 1}, process_group=group).group is group
    assert state(group=group).process_group is state(group).process_group is group
    assert hooks.PostLocalSGDState(group=group, subgroup=group, start_localSGD_iter=1)
    with pytest.raises(UsageError, match="DistributedDataParallel: pass either group= or process_group="):
        shoal.DistributedDataParallel(mlp(), group=group, process_group=group)
    for name, advice in (
        ("device_mesh", "as in group=mesh.get_group"),
        ("bucket_cap_mb_list", "all buckets have the limit bucket_cap_mb"),
        ("batched_grad_copy", "leave it out"),
        ("forward_sync_buffers", "did you mean 'broadcast_buffers'"),
    ):
        with pytest.raises(UsageError, match=advice):
            wrapped(group, **{name: None})
