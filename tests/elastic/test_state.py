"""State: what a step that comes again starts from, checkpoints, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import UsageError
from shoal.elastic import Samples, State

from .training import Training


def test_parts_are_attributes_and_plain_values_can_be_set() -> None:
    net = nn.Linear(2, 2)
    state = State(model=net, best=0.0)
    assert state.model is net
    assert (state.best, state.steps, state.samples) == (0.0, 0, None)
    state.best = 2.0
    assert state.best == 2.0
    with pytest.raises(AttributeError, match="no part 'bset'"):
        state.bset = 1.0
    with pytest.raises(AttributeError, match="no part 'other'"):
        state.other  # noqa: B018
    with pytest.raises(UsageError, match="'model' is a Linear, which cannot be replaced"):
        state.model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="cannot become a Linear"):
        state.best = nn.Linear(2, 2)


def test_what_forward_changes_is_undone_and_parameters_stay() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = State(model=net, losses=[], count=0)
    state.hold()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net(torch.randn(5, 3)).sum().backward()
    state.losses.append(1.0)
    state.count += 1
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])
    net[1].running_var = net[1].running_var.clone()  # a module may replace its buffer
    state.put_back()
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    assert (state.losses, state.count) == ([], 0)
    assert bool((net[0].weight == 3.0).all())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_buffers_of_every_kind_are_undone() -> None:
    net = nn.Linear(3, 3)
    net.register_buffer("expanded", torch.ones(1).expand(4))
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    net.add_module("scripted", torch.jit.script(nn.BatchNorm1d(3)))
    state = State(model=net)
    for _ in range(2):
        state.hold()
        net.expanded[:1].fill_(5.0)
        net.sparse.mul_(3.0)
        net.scripted(torch.randn(4, 3))
        state.put_back()
        assert net.expanded.tolist() == [1.0] * 4
        assert torch.equal(net.sparse.to_dense(), torch.eye(2))
        assert net.scripted.num_batches_tracked.item() == 0
        assert net.scripted.running_mean.tolist() == [0.0] * 3


def test_a_digest_tells_of_one_bit_in_parameters_and_optimisers() -> None:
    one, other = Training(), Training()
    assert one.state.digest() == other.state.digest()
    assert len(one.state.digest()) == 32
    one.loss(one.net, torch.arange(3)).backward()
    one.update()
    digests = {other.state.digest(), one.state.digest()}
    with torch.no_grad():
        one.net[0].weight[0, 0] *= 1 + 2**-52
    digests.add(one.state.digest())
    one.optimizer.state[one.net[0].weight]["exp_avg"][0, 0] *= 1 + 2**-52
    digests.add(one.state.digest())
    one.optimizer.param_groups[0]["lr"] *= 2
    digests.add(one.state.digest())
    assert len(digests) == 5


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    one = Training()
    for _ in range(3):
        one.loss(one.net, one.samples.share(0, 1).indices).backward()
        one.update()
        one.state.step_counts(12)
    one.state.best = 0.75
    one.state.save(tmp_path / "state.pt")
    assert os.listdir(tmp_path) == ["state.pt"]
    other = Training(seed=1)
    other.state.load(tmp_path / "state.pt")
    assert other.state.digest() == one.state.digest()
    assert (other.state.steps, other.state.best) == (3, 0.75)
    assert other.samples.state_dict() == one.samples.state_dict()
    assert other.scheduler.state_dict() == one.scheduler.state_dict()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(best=1.0)
    state.save(tmp_path / "state.pt")

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on device")

    state.best = 2.0
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            state.save(tmp_path / "state.pt")
    assert os.listdir(tmp_path) == ["state.pt"]
    state.load(tmp_path / "state.pt")
    assert state.best == 1.0


def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path) -> None:
    State(best=1.0, samples=Samples(5, batch=1)).save(tmp_path / "state.pt")
    with pytest.raises(UsageError, match="holds the parts best and samples; this State has best"):
        State(best=1.0).load(tmp_path / "state.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"other\.pt was not written by State\.save"):
        State(best=1.0).load(tmp_path / "other.pt")


def test_what_cannot_follow_a_group_that_shrinks_is_refused() -> None:
    net: Any = nn.Linear(2, 2)
    with shoal.init() as group:
        zero = shoal.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, group=group, lr=0.1)
        model = shoal.DistributedDataParallel(net, group=group)
        averager = shoal.PeriodicModelAverager(2, group=group)
        local = shoal.PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
        for parts, said in (
            ({"optimizer": zero}, r"'optimizer' is a ZeroRedundancyOptimizer, .* Make it with copies=2"),
            ({"optimizer": local}, "'optimizer' is a PostLocalSGDOptimizer"),
            ({"model": model}, "'model' is wrapped already; give State the module itself"),
            ({"samples": [1, 2]}, r"samples must be shoal\.elastic\.Samples, got list"),
            ({"nets": [net]}, "'nets' has a Linear inside"),
            ({"nets": {"a": net}}, "'nets' has a Linear inside"),
            ({"save": 1}, "'save' cannot be the name of a part"),
            ({"_parts": 1}, "'_parts' cannot be the name of a part"),
        ):
            with pytest.raises(UsageError, match=said):
                State(**parts)  # type: ignore[arg-type]
