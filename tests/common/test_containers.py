"""Walks over values of users: cycles, shared parts, depth, and code of users that must not run."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import register_pytree_node

from shoal.common.containers import Tree, leaves, map_leaves, tensors
from shoal.errors import UsageError

Pair = namedtuple("Pair", ["first", "second"])


class Computed(Mapping[str, Any]):
    """A mapping whose items are computed when they are read."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("it was read")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it was read")

    def __len__(self) -> int:
        raise AssertionError("it was read")


class Proxy:
    """An object that raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


class Eager(dict[str, Any]):
    """A dict whose own methods must not be called."""

    def values(self) -> Any:
        raise AssertionError("it was read")

    __iter__ = __getitem__ = values  # type: ignore[assignment]


@dataclass
class Record:
    tensor: torch.Tensor
    inside: list[Any] = field(default_factory=list)

    @property
    def lazy(self) -> Any:
        raise AssertionError("it was read")


@dataclass(slots=True)
class Slotted:
    tensor: torch.Tensor


class Broken:
    """Registered with torch, and cannot be flattened."""


def _raise(value: Any) -> Any:
    raise LookupError("no flattening")


register_pytree_node(Broken, _raise, lambda items, context: Broken())


def shared(depth: int) -> Any:
    value: Any = [torch.ones(1)]
    for _ in range(depth):
        value = [value, value]
    return value


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(depth):
        value = [value]
    return value


def test_the_tensors_of_every_container_are_found_in_order() -> None:
    x = [torch.full((1,), float(i)) for i in range(12)]
    value = {
        "list": [x[0], (x[1], Pair(x[2], None))],
        "record": Record(x[3], [x[4]]),
        "slots": Slotted(x[5]),
        "dicts": [OrderedDict(a=x[6]), defaultdict(list, a=x[7]), UserDict(a=x[8]), Eager(a=x[9])],
        "deque": deque([x[10]]),
        "set": {x[11]},
    }
    assert [tensor.item() for tensor in tensors(value)] == list(range(12))


@pytest.mark.parametrize("kind", [Computed, Proxy, lambda: Record, lambda: UserDict.__new__(UserDict)])
def test_the_code_of_users_does_not_run(kind: Callable[[], Any]) -> None:
    value = kind()
    assert list(tensors([value, {"x": value}])) == []
    assert map_leaves(lambda leaf: leaf, [value])[0] is value


def test_a_container_may_contain_itself() -> None:
    x = torch.ones(1)
    tree: dict[str, Any] = {"x": x, "children": []}
    tree["children"].append(Pair(tree, deque([tree["children"]])))
    assert list(tensors(tree)) == [x]
    copy = map_leaves(lambda leaf: leaf + 1, tree)
    assert copy["x"].item() == 2
    pair = copy["children"][0]
    assert type(pair) is Pair
    assert pair.first is copy
    assert pair.second[0] is copy["children"]
    assert tree["x"] is x


def test_a_tuple_that_contains_itself_through_a_list_is_built_again() -> None:
    value: tuple[list[Any], int] = ([], 1)
    value[0].append(value)
    copy = map_leaves(lambda leaf: leaf + 1, value)
    assert copy[0][0] is copy
    assert copy[1] == 2


def test_what_cannot_be_built_again_is_refused() -> None:
    box = Box()
    box.content = (box,)
    with pytest.raises(UsageError, match="contains itself without a list or dict in between"):
        map_leaves(lambda leaf: leaf, [box])


class Box:
    content: Any = None


def _box(items: Any, context: Any) -> Box:
    made = Box()
    (made.content,) = items
    return made


register_pytree_node(Box, lambda box: ([box.content], None), _box)


@pytest.mark.parametrize("value", [shared(60), nested(20_000)], ids=["shared", "nested"])
def test_a_walk_takes_time_and_stack_for_the_containers_alone(value: Any) -> None:
    assert [tensor.item() for tensor in tensors(value)] == [1]
    assert [tensor.item() for tensor in tensors(map_leaves(lambda leaf: leaf * 2, value))] == [2]


def test_shared_parts_stay_shared() -> None:
    part = [torch.ones(1)]
    first, second = map_leaves(lambda leaf: leaf + 1, (part, part))
    assert first is second


def test_a_type_that_cannot_be_flattened_is_an_error_where_it_can_be_delivered() -> None:
    x = torch.ones(1)
    with pytest.raises(LookupError):
        list(leaves([Broken(), x]))
    assert list(tensors([Broken(), x], tolerant=True)) == [x]


def test_containers_keep_what_belongs_to_them() -> None:
    state: OrderedDict[str, Any] = OrderedDict(a=1)
    state._metadata = "version"  # type: ignore[attr-defined]
    value = [state, deque([1], maxlen=3), defaultdict(list, a=1), torch.Size([1]), frozenset([1])]
    copy = map_leaves(lambda leaf: leaf, value)
    assert copy == value
    assert copy[0]._metadata == "version"
    assert copy[1].maxlen == 3
    assert copy[2].default_factory is list
    assert [type(each) for each in copy] == [type(each) for each in value]


def test_trees_of_equal_containers_have_equal_forms() -> None:
    assert Tree([1, {"a": 2}]).form == Tree([3, {"a": 4}]).form
    assert Tree([1, {"a": 2}]).form != Tree([1, {"b": 2}]).form
    assert Tree([1, (2,)]).form != Tree([1, [2]]).form
    assert repr(Tree([1, {"a": (2, 3)}])) == "list(*, dict('a': tuple(*, *)))"
