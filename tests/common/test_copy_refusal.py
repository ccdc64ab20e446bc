"""Objects that own resources refuse to be copied, and stay usable."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import MemoryStore, PrefixStore, ProcessGroup, TCPStoreServer, UsageError
from shoal.store import open_store

SOURCES = Path(shoal.__file__).parent

DUPLICATES: tuple[Callable[[Any], Any], ...] = (copy.copy, copy.deepcopy, pickle.dumps)


def _assert_refused(owner: Any, words: str) -> None:
    for duplicate in DUPLICATES:
        with pytest.raises(UsageError, match=rf"{words} cannot be copied or pickled: it owns .*\. [A-Z]"):
            duplicate(owner)
    gc.collect()


def test_a_group_and_what_belongs_to_it_refuse_and_go_on() -> None:
    with shoal.init() as group, group.split(0) as inner:
        x = torch.ones(2)
        future = group.all_reduce(x)
        for owner, words in (
            (group, "a ProcessGroup"), (inner, "a ProcessGroup"), (future, "a future"),
            (shoal.Future(), "a future"), (group._world, "the world of a process group"),
            (group.recorder, "a FlightRecorder"), (group._world.membership.store, "a Store"),
        ):  # fmt: skip
            _assert_refused(owner, words)
        future.wait()
        assert group.all_reduce(x).wait().tolist() == [1.0, 1.0]
        assert inner.all_reduce(x).wait().tolist() == [1.0, 1.0]


def test_an_agent_and_what_belongs_to_it_refuse_and_go_on() -> None:
    with shoal.init() as group, shoal.rpc.join(group=group) as agent:
        peer = agent.peer(0)
        call = peer.call(abs, -3)
        _assert_refused(agent, "an Agent")
        _assert_refused(agent.recorder, "a CallRecorder")
        _assert_refused(call, "a future")
        reference = peer.remote(abs, -2)
        for each in (peer, reference):
            for duplicate in DUPLICATES:
                with pytest.raises(UsageError, match="can only be sent to other workers of its job"):
                    duplicate(each)
        gc.collect()
        assert call.wait() == 3
        assert reference.to_here() == 2


def test_stores_and_their_servers_refuse_and_go_on(tmp_path: Path) -> None:
    with TCPStoreServer() as server:
        stores = [
            MemoryStore(), PrefixStore("a", MemoryStore()), open_store(f"file://{tmp_path}/store"),
            open_store(f"tcp://{server.host}:{server.port}"),
        ]  # fmt: skip
        _assert_refused(server, "a server")
        for store in stores:
            _assert_refused(store, "a Store")
            store.set("key", b"value")
            assert store.get("key") == b"value"
            store.close()


class Net(nn.Module):
    """A module that keeps its group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.group = group


def test_a_module_that_keeps_its_group_is_told_so() -> None:
    with shoal.init() as group:
        with pytest.raises(UsageError, match=r"a ProcessGroup cannot be copied .* Keep it outside"):
            copy.deepcopy(Net(group))
        assert group.all_reduce(torch.ones(1)).wait().item() == 1.0


def test_a_copy_of_a_wrapped_model_closes_nothing_of_the_original() -> None:
    with shoal.init() as group:
        model = shoal.DistributedDataParallel(nn.Linear(2, 2), group=group)
        for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            assert other.module is not model
            del other
            gc.collect()
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError, match="a Join cannot be copied"):
            copy.copy(shoal.Join([model]))


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in SOURCES.rglob("*.py"):
        names = path.relative_to(SOURCES).with_suffix("").parts
        if names[0] not in ("tools", "testing"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    yield ".".join(("shoal", *names)), node


def _defines(node: ast.ClassDef, name: str) -> bool:
    return any(
        (isinstance(each, ast.FunctionDef) and each.name == name)
        or (isinstance(each, ast.Assign) and name in [ast.unparse(target) for target in each.targets])
        for each in node.body
    )


def _refuses(kind: type) -> bool:
    return (
        getattr(kind.__reduce_ex__, "__module__", None) == "shoal.common.copy_refusal"
        or kind.__reduce__ is not object.__reduce__
    )


def test_every_class_whose_objects_release_something_when_they_are_dropped_refuses_copies() -> None:
    found = [(module, node.name) for module, node in _classes() if _defines(node, "__del__")]
    assert len(found) > 8
    for module, name in found:
        assert _refuses(getattr(importlib.import_module(module), name)), f"{module}.{name}"


@pytest.mark.parametrize(
    "module", ["shoal", "shoal.elastic", "shoal.rpc", "shoal.store", "shoal.distributed"]
)
def test_every_public_class_that_can_be_closed_refuses_copies(module: str) -> None:
    public = importlib.import_module(module)
    names = [name for name in dir(public) if not name.startswith("_")]
    kinds = [each for name in names if isinstance(each := getattr(public, name), type)]
    closable = [each for each in kinds if hasattr(each, "close") and each.__module__.startswith("shoal")]
    assert closable
    for each in closable:
        assert _refuses(each), each
