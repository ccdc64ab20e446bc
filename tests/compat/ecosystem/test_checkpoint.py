"""torch.distributed.checkpoint: saving, loading, in the background, with other ranks, across backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree

from .compare import World, on_gloo, on_shoal, same_as_gloo
from .models import mlp, train


class App:
    """A model, its optimizer and a counter, as torch's documents save them."""

    def __init__(self, world: World, wrap: str = "fsdp2", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.world, self.steps = world, 0
        model: nn.Module = mlp()
        if wrap == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
        elif wrap == "ddp":
            model = DDP(model, process_group=world.group)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def train(self) -> None:
        self.steps += 3
        train(self.model, self.world, optimizer=self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def whole(self) -> Any:
        """Everything as plain tensors, the same ones on every rank."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        return self.steps, get_state_dict(self.model, self.optimizer, options=options)


def saved_and_loaded(world: World, wrap: str = "fsdp2") -> Any:
    app = App(world, wrap)
    app.train()
    dcp.save({"app": app}, checkpoint_id=world.scratch)
    other = App(world, wrap, seed=1)
    dcp.load({"app": other}, checkpoint_id=world.scratch)
    other.train()
    return other.whole()


def replicas(world: World) -> Any:
    """Every rank has all of it, and one of them writes it."""
    return saved_and_loaded(world, "ddp")


def in_the_background(world: World) -> Any:
    """In a group of its own: two threads' operations would come in another order on every rank."""
    app = App(world)
    app.train()
    response = dcp.async_save({"app": app}, checkpoint_id=world.scratch, process_group=dist.new_group())
    app.train()  # the copy that is being written does not change
    getattr(response, "upload_completion", response).result()
    other = App(world, seed=1)
    dcp.load({"app": other}, checkpoint_id=world.scratch)
    return other.whole(), app.whole()


def placements(world: World) -> Any:
    """Saved in one placement, loaded in another."""
    mesh = init_device_mesh("cpu", (world.size,))
    x = torch.arange(42.0).reshape(7, 6)
    dcp.save({"x": distribute_tensor(x, mesh, [Shard(0)])}, checkpoint_id=world.scratch)
    results = []
    for placement in (Shard(1), Replicate(), Shard(0)):
        y = distribute_tensor(torch.zeros(7, 6), mesh, [placement])
        dcp.load({"x": y}, checkpoint_id=world.scratch)
        assert torch.equal(y.full_tensor(), x)
        results.append(y.to_local())
    return results


def shards_of_fsdp1(world: World) -> Any:
    model = FSDP(mlp(), process_group=world.group, device_id=torch.device("cpu"), use_orig_params=True)
    train(model, world)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=world.scratch)
    other = FSDP(mlp(), process_group=world.group, device_id=torch.device("cpu"), use_orig_params=True)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=world.scratch)
        other.load_state_dict(state["model"])
    return train(other, world)


def of_some_keys_by_object(world: World) -> Any:
    """Plain values and objects, and what each rank alone has."""
    state: dict[str, Any] = {
        "shared": {"lr": 0.1, "names": ["a", "b"]},
        f"rank{world.rank}": torch.ones(3) * world.rank,
    }
    dcp.save(state, checkpoint_id=world.scratch)
    again: dict[str, Any] = {"shared": {"lr": 0.0, "names": []}, f"rank{world.rank}": torch.zeros(3)}
    dcp.load(again, checkpoint_id=world.scratch)
    return again["shared"]["lr"], again["shared"]["names"], again[f"rank{world.rank}"]


CASES = [saved_and_loaded, replicas, in_the_background, placements, shards_of_fsdp1, of_some_keys_by_object]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_checkpoint_is_that_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)


def saved(world: World, path: Path) -> Any:
    app = App(world)
    app.train()
    dcp.save({"app": app}, checkpoint_id=path)
    return app.whole()


def loaded(world: World, path: Path) -> Any:
    app = App(world, seed=1)
    dcp.load({"app": app}, checkpoint_id=path)
    local = app.model.get_parameter("0.weight")
    assert isinstance(local, DTensor)
    assert local.to_local().shape[0] == 16 // world.size
    return app.whole()


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4)])
@pytest.mark.parametrize(("write", "read"), [(on_shoal, on_shoal), (on_gloo, on_shoal), (on_shoal, on_gloo)])
def test_other_numbers_of_ranks_load_it_over_other_backends(ranks, tmp_path, writers, readers, write, read):
    written = ranks(writers).run(write, saved, tmp_path)[0]
    for state in ranks(readers).run(read, loaded, tmp_path):
        ours, theirs = _pytree.tree_leaves(state), _pytree.tree_leaves(written)
        assert len(ours) == len(theirs) > 10
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
