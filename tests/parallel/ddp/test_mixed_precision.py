"""Mixed precision: the passes run in half precision, and everyone else sees full precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal import MixedPrecision
from shoal.errors import ModelMismatch, UsageError
from shoal.testing import run_threads
from tests.parallel.ddp.half import BF16, HALF, by_hand, wrap
from tests.parallel.models import Normed, batches, fixed, loss_of, mlp, part
from tests.parallel.training import assert_close, assert_same_bits, gradients, on_ranks, pairwise, sgd, values


@pairwise(size=[1, 2], dtype=[BF16, torch.float16], reduce_dtype=[None, torch.float32])
def test_training_equals_casting_by_hand(
    size: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> None:
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype)
    data = batches(1, dtype=torch.float32) * 10

    def rank(group: shoal.ProcessGroup) -> tuple[nn.Module, list[float]]:
        own = mlp(torch.float32)
        model = wrap(own, group, precision)
        reference = mlp(torch.float32)
        optimizers = [sgd(own), sgd(reference)]
        losses = []
        for batch in data:
            optimizers[0].zero_grad()
            loss = loss_of(model, part(batch, group))
            loss.backward()
            losses.append(loss.item())
            expected = by_hand(reference, batch, size, precision)
            assert_same_bits(gradients(own), expected)
            for parameter, gradient in zip(reference.parameters(), expected, strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
        return own, losses

    results = run_threads(rank, size)
    for own, losses in results:
        assert losses[-1] < 0.7 * losses[0]
        assert_same_bits(values(own), values(results[0][0]))


@on_ranks(1)
def test_whoever_looks_between_the_passes_sees_full_precision(group: shoal.ProcessGroup) -> None:
    seen = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            seen.extend(parameter.dtype for parameter in self.parameters())
            return self.inner(x)

    model = wrap(Looking(), group, HALF)
    identities = [id(parameter) for parameter in model.parameters()]

    def check() -> None:
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
        assert copy.deepcopy(model.module)(torch.ones(1, 6)).dtype == torch.float32

    check()
    for context in (torch.enable_grad, torch.no_grad, model.no_sync):
        seen.clear()
        with context():
            output = model(torch.ones(4, 6))
        assert set(seen) == {BF16}
        assert output.dtype == BF16
        check()
        if output.requires_grad:
            output.float().sum().backward()
        check()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).dtype == torch.float32


@on_ranks(1)
def test_full_precision_is_back_after_failures(group: shoal.ProcessGroup) -> None:
    own = mlp(torch.float32)
    model = wrap(own, group, HALF)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(4, 7))
    assert own[0].weight.dtype == torch.float32
    handle = own[3].register_full_backward_hook(lambda *_: 1 / 0)
    output = model(torch.ones(4, 6))
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    assert own[0].weight.dtype == torch.float32
    handle.remove()
    own.zero_grad()
    batch = batches(1, dtype=torch.float32)[0]
    loss_of(model, batch).backward()
    assert_same_bits(gradients(own), by_hand(own, batch, 1, HALF))


class Tied(nn.Module):
    """Shared weights, a checkpoint, recurrent weights, a frozen parameter and a constant."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.cell = nn.GRU(6, 6, batch_first=True)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.reentrant = reentrant
        fixed(self)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body(hidden) @ self.table.weight.t() @ self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cell(self.table(x))
        if self.reentrant is None:
            hidden = self.between(hidden)
        else:
            hidden = checkpoint(self.between, hidden, use_reentrant=self.reentrant)
        return self.head(hidden) * self.scale


@pytest.mark.parametrize(("reentrant", "copies"), [(None, 1), (True, 1), (True, 2), (False, 2)])
@on_ranks(1)
def test_tied_recurrent_and_checkpointed_models(
    group: shoal.ProcessGroup, reentrant: bool | None, copies: int
) -> None:
    words = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(5))
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    own = Tied(reentrant)
    model = wrap(own, group, precision, copies=copies, static_graph=reentrant is True)
    for _ in range(2):
        model.zero_grad()
        model(words).float().square().mean().backward()
        low = Tied(None).to(BF16)
        for part_of_words in words.chunk(copies):
            (low(part_of_words).float().square().mean() / copies).backward()
        for a, b in zip(gradients(own), gradients(low.float()), strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=2e-4)
    assert own.head.weight is own.table.weight
    with torch.no_grad():
        own.reentrant = None
        assert own(words).dtype == torch.float32


@on_ranks(2)
def test_accumulation_is_in_full_precision_and_zero_grad_forgets_it(group: shoal.ProcessGroup) -> None:
    data = batches(3, dtype=torch.float32)
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    own = mlp(torch.float32)
    model = wrap(own, group, precision)
    with model.no_sync():
        loss_of(model, part(data[0], group)).backward()
    own.zero_grad()
    for batch in data[:2]:
        with model.no_sync():
            loss_of(model, part(batch, group)).backward()
    low = copy.deepcopy(own).to(BF16)
    total = [torch.zeros_like(parameter) for parameter in own.parameters()]
    for batch in data[:2]:
        low.zero_grad()
        loss_of(low, (part(batch, group)[0].to(BF16), part(batch, group)[1])).backward()
        for one, parameter in zip(total, low.parameters(), strict=True):
            one += parameter.grad.float()
    assert_same_bits(gradients(own), total)
    loss_of(model, part(data[2], group)).backward()
    together = [by_hand(own, batch, 2, precision) for batch in data]
    assert_close(gradients(own), [sum(same) for same in zip(*together, strict=True)])


@on_ranks(2)
def test_the_reduction_alone_may_be_lower(group: shoal.ProcessGroup) -> None:
    batch = batches(1, dtype=torch.float32)[0]
    precision = MixedPrecision(reduce_dtype=torch.float16)
    own = mlp(torch.float32)
    model = wrap(own, group, precision)
    for _ in range(2):
        own.zero_grad()
        output = model(part(batch, group)[0])
        assert output.dtype == torch.float32
        ((output - part(batch, group)[1]) ** 2).mean().backward()
        full = MixedPrecision(param_dtype=torch.float32)
        for parameter, exact in zip(own.parameters(), by_hand(own, batch, 2, full), strict=True):
            assert torch.equal(parameter.grad, parameter.grad.half().float())
            torch.testing.assert_close(parameter.grad, exact, rtol=2e-3, atol=1e-4)


class Buffered(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.tensor([1.0001]))
        self.register_buffer("replaced", torch.zeros(1))
        self.seen: list[torch.dtype] = []
        fixed(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [buffer.dtype for buffer in self.buffers()]
        self.replaced = self.replaced + 1
        return super().forward(x) * self.constant


@pytest.mark.parametrize(("copies", "param_dtype"), [(1, BF16), (2, BF16), (2, None)])
@on_ranks(1)
def test_buffers_are_cast_and_keep_their_digits(
    group: shoal.ProcessGroup, copies: int, param_dtype: torch.dtype | None
) -> None:
    precision = MixedPrecision(param_dtype=param_dtype, buffer_dtype=param_dtype or torch.float64)
    batch = batches(1, dtype=torch.float32)[0]
    own = Buffered()
    if param_dtype is None:
        own.norm = nn.Identity()
    model = wrap(own, group, precision, copies=copies)
    reference = copy.deepcopy(own).to(param_dtype)
    for _ in range(3):
        loss_of(model, batch).backward()
        reference(batch[0][: 12 // copies].to(param_dtype))
    assert set(own.seen) <= {precision.buffer_dtype, torch.int64}
    assert own.constant.item() == torch.tensor(1.0001).item()
    assert own.replaced.item() == 3
    for (name, a), b in zip(own.named_buffers(), reference.buffers(), strict=True):
        assert a.dtype == (torch.int64 if "num_batches" in name else torch.float32)
        torch.testing.assert_close(a, b.to(a.dtype), rtol=0.02, atol=1e-3)


@on_ranks(1)
def test_only_floating_point_inputs_are_cast_and_only_if_wanted(group: shoal.ProcessGroup) -> None:
    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, *, rest: dict[str, Any]) -> list[torch.dtype]:
            packed = rest["packed"].data
            return [x.dtype, rest["list"][0].dtype, rest["ids"].dtype, rest["complex"].dtype, packed.dtype]

    rest = {
        "list": [torch.ones(1, dtype=torch.float64)],
        "ids": torch.ones(1, dtype=torch.int64),
        "complex": torch.ones(1, dtype=torch.complex64),
        "packed": nn.utils.rnn.pack_sequence([torch.ones(2)]),
    }
    model = wrap(Telling(), group, HALF)
    assert model(torch.ones(1), rest=rest) == [BF16, BF16, torch.int64, torch.complex64, BF16]
    kept = MixedPrecision(param_dtype=BF16, cast_forward_inputs=False)
    model = wrap(Telling(), group, kept)
    assert model(torch.ones(1), rest=rest)[:2] == [torch.float32, torch.float64]


@on_ranks(2)
def test_loss_scaling_with_float16(group: shoal.ProcessGroup) -> None:
    batch = batches(1, dtype=torch.float32)[0]
    precision = MixedPrecision(param_dtype=torch.float16)
    own = mlp(torch.float32)
    model = wrap(own, group, precision)
    optimizer = torch.optim.Adam(own.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, part(batch, group))
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**24  # it was too large for half precision
    assert losses[-1] < losses[0]


# -- what is said --------------------------------------------------------------------------------


@on_ranks(1)
def test_a_backward_pass_through_old_weights_is_refused(group: shoal.ProcessGroup) -> None:
    model = wrap(mlp(torch.float32), group, HALF)
    loss = loss_of(model, batches(1, dtype=torch.float32)[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model(torch.ones(1, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("value", [torch.int8, "bfloat16"])
def test_a_dtype_must_be_a_floating_point_one(value: Any) -> None:
    with pytest.raises(UsageError, match="reduce_dtype must be a floating-point dtype"):
        MixedPrecision(reduce_dtype=value)


@on_ranks(1)
def test_parameters_that_the_module_hides_are_refused(group: shoal.ProcessGroup) -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shown = nn.Parameter(torch.ones(1))
            self.hidden = nn.Parameter(torch.ones(1))

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if name == "shown")

    with pytest.raises(UsageError, match="'hidden' of Hiding requires a gradient"):
        wrap(Hiding(), group, HALF)


@on_ranks(2)
def test_ranks_with_other_precisions_are_told(group: shoal.ProcessGroup) -> None:
    precision = MixedPrecision(param_dtype=BF16 if group.rank else torch.float16)
    with pytest.raises(ModelMismatch, match="option mixed_precision is MixedPrecision"):
        wrap(mlp(torch.float32), group, precision)
