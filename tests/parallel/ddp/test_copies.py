"""Several copies of a model in one process: the first one's training is that of the whole batch."""

from __future__ import annotations

import copy
import threading
import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.parallel.ddp.copies import Copies, pick_devices
from shoal.parallel.ddp.module_tensors import Mirror
from tests.parallel.models import Normed, batches, fixed, loss_of, mlp
from tests.parallel.training import (
    assert_as_simulated,
    assert_close,
    assert_gradients,
    assert_reduces,
    on_ranks,
    sgd,
    steps,
    train,
    values,
    wrapped,
)

CPU = torch.device("cpu")


# -- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("copies", "as_views"), [(1, True), (2, False), (3, True)])
def test_copies_and_ranks_train_like_one_process(size: int, copies: int, as_views: bool) -> None:
    assert_as_simulated(steps(batches(6)), size, copies=copies, gradient_as_bucket_view=as_views)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_batches_too_small_for_all_copies_count_in_full(set_to_none: bool) -> None:
    """Ranks with other numbers of copies and rows; after small batches large ones again."""
    data = [(x[:rows], y[:rows]) for rows, (x, y) in zip((12, 4, 12, 2, 8), batches(5), strict=True)]
    assert_as_simulated(
        steps(data, set_to_none=set_to_none),
        wrap=lambda group, model: wrapped(group, model, copies=3 - group.rank),
    )


@on_ranks(1)
def test_the_state_and_parameters_are_those_of_one_model(group: shoal.ProcessGroup) -> None:
    own = mlp()
    model = wrapped(group, own, copies=3)
    assert list(model.state_dict()) == [f"module.{name}" for name in own.state_dict()]
    assert [id(p) for p in model.parameters()] == [id(p) for p in own.parameters()]
    assert sum(1 for _ in model.modules()) == 1 + sum(1 for _ in own.modules())
    loss_of(model, batches(1)[0]).backward()
    for other in model._copies.modules[1:]:
        assert all(parameter.grad is None for parameter in other.parameters())
    again = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(again(torch.ones(4, 6).double()), own(torch.ones(4, 6).double()))


@on_ranks(1)
def test_running_statistics_are_those_of_the_first_copy(group: shoal.ProcessGroup) -> None:
    data = batches(4)
    own, reference = fixed(Normed().double()), fixed(Normed().double())
    model = wrapped(group, own, copies=2)
    train(model, data)
    optimizer = sgd(reference)
    for x, y in data:
        optimizer.zero_grad()
        first, second = x.chunk(2)
        output = reference(first)
        statistics = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        output = torch.cat([output, reference(second)])
        for name, buffer in reference.named_buffers():
            buffer.data.copy_(statistics[name])
        ((output - y) ** 2).mean().backward()
        optimizer.step()
    assert_close(values(own), values(reference))
    assert_close(list(own.buffers()), list(reference.buffers()))
    torch.testing.assert_close(model.eval()(data[0][0]), reference.eval()(data[0][0]))
    assert not any(part.training for one in model._copies.modules for part in one.modules())


@on_ranks(1)
def test_copies_see_parameters_loaded_between_steps(group: shoal.ProcessGroup) -> None:
    own = mlp()
    model = wrapped(group, own, copies=3)
    x = batches(1)[0][0]
    model(x)
    other = mlp()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    own.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x))
    for parameter in own.parameters():  # unseen by torch's version counters
        parameter.data = parameter.data / 2
    torch.testing.assert_close(model(x), mlp()(x))


# -- accumulation --------------------------------------------------------------------------------


@on_ranks(1)
def test_a_pass_without_reduction_leaves_all_gradients_with_the_first_copy(group: shoal.ProcessGroup) -> None:
    (batch,) = batches(1)
    model = wrapped(group, copies=3)
    with model.no_sync():
        loss_of(model, batch).backward()
    assert_gradients(model, batch)
    assert_reduces(model, group, [batch])  # it forgets all of them


@pytest.mark.parametrize("local", [True, False])
@on_ranks(1)
def test_gradients_of_a_pass_that_failed_are_forgotten(group: shoal.ProcessGroup, local: bool) -> None:
    (batch,) = batches(1)
    model = wrapped(group, copies=2)
    with model.no_sync() if local else nullcontext():
        loss = loss_of(model, batch)
    handle = model.module[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    assert_reduces(model, group, [batch, batch])


@on_ranks(1)
def test_two_forward_passes_before_one_backward(group: shoal.ProcessGroup) -> None:
    large, (x, y) = batches(2)
    model = wrapped(group, copies=3)
    (loss_of(model, large) + loss_of(model, (x[:2], y[:2]))).backward()
    assert_gradients(model, large, (x[:2], y[:2]))


@pytest.mark.parametrize("half", [False, True])
@on_ranks(1)
def test_forward_passes_between_other_backward_passes(group: shoal.ProcessGroup, half: bool) -> None:
    """No step was taken, so graphs from before a reduced pass are still good."""
    data = batches(3, dtype=torch.float32)
    precision = shoal.MixedPrecision(param_dtype=torch.bfloat16) if half else None
    model = wrapped(group, mlp(torch.float32), copies=2, mixed_precision=precision)
    with model.no_sync():
        second = loss_of(model, data[1])
    loss_of(model, data[0]).backward()
    loss_of(model, data[2])
    second.backward()


# -- forward -------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.min() < 0:
            raise ValueError("negative")
        return x * self.weight


@pytest.mark.parametrize("which", [0, 1, 2])
@on_ranks(1)
def test_an_error_in_a_copy_names_the_copy(group: shoal.ProcessGroup, which: int) -> None:
    model = wrapped(group, Failing(), copies=3)
    x = torch.ones(3)
    x[which] = -1
    with pytest.raises(ValueError, match="negative") as caught:
        model(x)
    told = "".join(traceback.format_exception(caught.value))
    assert f"raised in copy {which} of 3 on cpu" in told
    model(torch.ones(3)).sum().backward()
    assert model.module.weight.grad == 3


class Asking(nn.Module):
    """Returns what its thread's settings are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "dtype": str(torch.get_autocast_dtype("cpu")),
            "cache": torch.is_autocast_cache_enabled(),
            "product": x @ self.weight,
        }


@on_ranks(1)
def test_threads_of_copies_have_the_settings_of_the_caller(group: shoal.ProcessGroup) -> None:
    x = torch.ones(4, 2)
    model = wrapped(group, Asking(), copies=2)
    usual = model(x)
    assert (usual["grad"], usual["inference"], usual["autocast"], usual["cache"]) == (
        True,
        False,
        False,
        True,
    )
    with torch.no_grad():
        assert not model(x)["grad"]
    with torch.inference_mode():
        told = model(x)
        assert told["inference"] is told["product"].is_inference() is True
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        told = model(x)
        assert (told["autocast"], told["dtype"], told["cache"]) == (True, "torch.float16", False)
        assert told["product"].dtype == torch.float16
        told["product"].sum().backward()
    assert not model(x)["autocast"]


def test_parameters_that_share_memory_in_the_model_do_so_in_a_copy() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    copies = Copies(tied, [CPU] * 2, CPU, 0)
    other = copies.modules[1]
    assert other[1].weight is other[0].weight is not tied[0].weight


def test_buffers_that_the_model_replaces_reach_the_copies() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (0 if self.cache is None else self.cache.sum())

    module = Caching()
    copies = Copies(module, [CPU] * 2, CPU, 0)
    for cache in (None, torch.ones(2), torch.ones(3), 2 * torch.ones(3), None):
        expected = 0 if cache is None else cache.sum()
        module.cache = cache
        assert copies(module, (torch.zeros(2),), {}, 0).tolist() == [expected] * 2
        assert cache is None or copies.modules[1].cache is not cache


# -- devices -------------------------------------------------------------------------------------


@on_ranks(1)
def test_one_device_moves_inputs_there_and_several_are_checked(group: shoal.ProcessGroup) -> None:
    model = shoal.DistributedDataParallel(mlp(), ["cpu"], "cpu", group=group)
    assert_reduces(model, group, batches(1))
    elsewhere = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match="must be on cpu, but it is on meta"):
        shoal.DistributedDataParallel(elsewhere, ["cpu", "cpu"], group=group)
    with pytest.raises(UsageError, match="output_device needs device_ids"):
        shoal.DistributedDataParallel(mlp(), output_device="cpu", group=group)
    with pytest.raises(UsageError, match="output_device=meta differs"):
        shoal.DistributedDataParallel(mlp(), ["cpu"], "meta", group=group)
    unlike = mlp()
    unlike.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"copy\.deepcopy fails: cannot pickle"):
        wrapped(group, unlike, copies=2)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there are accelerators here")
def test_a_number_without_an_accelerator_is_refused() -> None:
    with pytest.raises(UsageError, match="torch finds no accelerator"):
        pick_devices(mlp().parameters(), [0, 1], None)


@on_ranks(1)
def test_other_dimensions_can_be_split(group: shoal.ProcessGroup) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.t()).t()

    x, y = batches(1)[0]
    model = wrapped(group, Turned(), copies=2, dim=1)
    loss_of(model, (x.t(), y.t())).backward()
    assert_gradients(model, (x, y))


def test_followers_are_written_to_only_after_a_change() -> None:
    source = torch.ones(2, requires_grad=True)
    follower = torch.zeros(2, requires_grad=True)
    mirror = Mirror([source], [[follower]])
    mirror.refresh(0)
    version = follower._version
    mirror.refresh(0)
    assert follower._version == version
    with torch.no_grad():
        source.mul_(2)
    source.requires_grad_(False)
    mirror.refresh(0)
    assert follower.tolist() == [2, 2]
    assert not follower.requires_grad
    version = follower._version
    source.data.mul_(2)  # torch does not notice
    mirror.refresh(1)
    assert follower.tolist() == [4, 4]
    assert follower._version == version
