"""Traversal of nested user values.

These types are containers:

- list, tuple, dict, set, frozenset, and classes derived from them, read by the methods of the base class
- ``collections.UserDict`` and ``UserList``, read by their attribute ``data``
- dataclasses, read by the values of their fields
- types registered with ``torch.utils._pytree``

Everything else is a leaf, including other mappings and sequences, which may compute their items when they are
read.  No user code runs, except the flatten and unflatten functions of registered types.

Each container is visited once, wherever it occurs.  So a container may contain itself, and the time is
proportional to the number of containers, not of paths.  The depth is not limited, as there is no recursion.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MemberDescriptorType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import UsageError

#: types that are quickly recognized as leaves
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_USER = (UserDict, UserList)
_MISSING = object()
_SHOWN_DEPTH, _SHOWN_ITEMS = 4, 8


def is_named_tuple(kind: type[Any]) -> bool:
    """Whether a type is a named tuple."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def is_tensor(value: object) -> bool:
    """Whether the type of ``value`` is a tensor; ``isinstance`` might run the ``__class__`` of a proxy."""
    return issubclass(type(value), torch.Tensor)


def leaves(value: object, *, tolerant: bool = False) -> Iterator[Any]:
    """Yield the leaves of ``value``, depth first.

    Args:
        tolerant: treat a value as a leaf if the flatten function of its type raises; for callers that cannot
            raise to the user.

    Raises:
        Exception: raised by the flatten function of a registered type, unless ``tolerant``.
    """
    if type(value) in _ATOMS or is_tensor(value):
        yield value
        return
    # Keeps the values alive, so that ids are not reused.
    visited: dict[int, object] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) in _ATOMS or is_tensor(item):
            yield item
        elif id(item) not in visited:
            try:
                items = _items(item)
            except Exception:
                if not tolerant:
                    raise
                items = None
            if items is None:
                yield item
            else:
                visited[id(item)] = item
                pending += reversed(items)


def tensors(value: object, *, tolerant: bool = False) -> Iterator[torch.Tensor]:
    """Return the tensors in ``value``; see :func:`leaves`."""
    return filter(is_tensor, leaves(value, tolerant=tolerant))


def map_leaves(fn: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a copy of ``value`` with each leaf replaced by ``fn(leaf)``; see :class:`Tree`."""
    tree = Tree(value, is_leaf)
    return tree.build([fn(leaf) for leaf in tree.leaves])


class Tree:
    """The structure and the leaves of a value, which can be rebuilt with other leaves.

    Only Python's own types (list, tuple, dict, set, frozenset) and registered types are containers here.
    Derived classes and dataclasses are leaves, because their base class cannot rebuild them.  A container
    that occurs twice is built once.

    Args:
        value: the value.
        is_leaf: whether to treat a container as a leaf.

    Attributes:
        leaves: the leaves, depth first; a leaf that occurs twice is listed twice.

    Raises:
        Exception: raised by the flatten function of a registered type.
    """

    def __init__(self, value: Any, is_leaf: Callable[[Any], bool] | None = None) -> None:
        self.leaves: list[Any] = []
        self._nodes: list[_ContainerNode] = []
        #: the numbers of the nodes, children before parents
        self._order: list[int] = []
        root: list[int] = []
        numbers: dict[int, int] = {}
        containers: list[Any] = []  # keeps them alive, so that ids are not reused
        open: list[tuple[Iterator[Any], list[int], int]] = [(iter((value,)), root, -1)]
        while open:
            items, places, number = open[-1]
            for item in items:
                known = numbers.get(id(item))
                if known is not None:
                    places.append(known)
                    continue
                found = None if is_leaf is not None and is_leaf(item) else _ContainerNode.of(item)
                if found is None:
                    places.append(~len(self.leaves))
                    self.leaves.append(item)
                    continue
                numbers[id(item)] = len(self._nodes)
                containers.append(item)
                places.append(len(self._nodes))
                self._nodes.append(found[0])
                open.append((iter(found[1]), found[0].places, numbers[id(item)]))
                break
            else:
                open.pop()
                if number >= 0:
                    self._order.append(number)
        self._root = root[0]

    @property
    def form(self) -> list[Any]:
        """The structure without leaves; equal for values with equal structures."""
        return [self._root, *((node.kind, node.context, node.places) for node in self._nodes)]

    def __repr__(self) -> str:
        """Return an abbreviated text such as ``tuple(*, list(*, *))``, with a star for each leaf."""
        return self._shown(self._root, _SHOWN_DEPTH)

    def _shown(self, place: int, depth: int) -> str:
        if place < 0:
            return "*"
        node = self._nodes[place]
        if depth == 0:
            return f"{node.kind.__qualname__}(...)"
        items = [self._shown(each, depth - 1) for each in node.places[:_SHOWN_ITEMS]]
        if node.kind in _DICTS:
            items = [f"{key!r}: {item}" for key, item in zip(node.context, items, strict=False)]
        more = ["..."] if len(node.places) > len(items) else []
        return f"{node.kind.__qualname__}({', '.join(items + more)})"

    def build(self, leaves: Sequence[Any]) -> Any:
        """Rebuild the value with other leaves.

        Raises:
            UsageError: a container that cannot be filled later, such as a tuple, contains itself.
            Exception: raised by the unflatten function of a registered type.
        """
        made = [_MISSING if node.empty is None else node.empty() for node in self._nodes]

        def items(node: _ContainerNode) -> list[Any]:
            return [made[place] if place >= 0 else leaves[~place] for place in node.places]

        later = []
        for number in self._order:
            node = self._nodes[number]
            inside = items(node)
            if made[number] is _MISSING:
                if any(item is _MISSING for item in inside):
                    raise UsageError(
                        f"a {node.kind.__qualname__} contains itself without a list or dict in between: it "
                        "cannot be rebuilt"
                    )
                made[number] = node.complete(inside)
            elif any(item is _MISSING for item in inside):
                later.append(number)  # it contains a tuple that contains it
            else:
                node.fill(made[number], inside)
        for number in later:
            node = self._nodes[number]
            node.fill(made[number], items(node))
        return made[self._root] if self._root >= 0 else leaves[0]


class _ContainerNode:
    """One container of a :class:`Tree`, without its items.

    Args:
        context: further data for rebuilding it, such as the keys of a dict.
        empty: makes an empty one, to which items can be added later; None: not possible.

    Attributes:
        places: for each item, the number of its node, or ``~i`` for the leaf ``i``.
    """

    __slots__ = ("context", "empty", "kind", "places")

    def __init__(self, kind: type[Any], context: Any, empty: Callable[[], Any] | None) -> None:
        self.kind = kind
        self.context = context
        self.empty = empty
        self.places: list[int] = []

    @staticmethod
    def of(value: Any) -> tuple[_ContainerNode, list[Any]] | None:
        """Return the node of a container, and its items; None for a leaf."""
        kind = type(value)
        if kind in _ATOMS or issubclass(kind, torch.Tensor):
            return None
        if kind is list:
            return _ContainerNode(kind, None, list), list(value)
        if kind in (tuple, set, frozenset):
            return _ContainerNode(kind, None, None), list(value)
        if kind is deque:
            return _ContainerNode(kind, value.maxlen, partial(deque, maxlen=value.maxlen)), list(value)
        if kind in _DICTS:
            return _ContainerNode(kind, list(value), _DICTS[kind](value)), list(value.values())
        found = _flattened(value)
        return None if found is None else (_ContainerNode(kind, found[1], None), found[0])

    def fill(self, made: Any, items: list[Any]) -> None:
        """Add the items to a container made by ``empty``."""
        if isinstance(made, dict):
            made.update(zip(self.context, items, strict=True))
        else:
            made.extend(items)

    def complete(self, items: list[Any]) -> Any:
        """Return a container of ``items``."""
        if self.kind in (tuple, set, frozenset):
            return self.kind(items)
        return tree_unflatten(items, self.context)


def _ordered(attributes: dict[str, Any]) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict()
    made.__dict__.update(attributes)
    return made


#: type of dict -> function that, given one, returns a function that makes an empty dict like it
_DICTS: dict[type[Any], Callable[[Any], Callable[[], Any]]] = {
    dict: lambda _: dict,
    OrderedDict: lambda value: partial(_ordered, dict(value.__dict__)),
    defaultdict: lambda value: partial(defaultdict, value.default_factory),
}


def _items(value: Any) -> list[Any] | None:
    """Return the elements of a container, or None for a leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return list(value)
    if kind is dict:
        return list(value.values())
    registered = _flattened(value)
    if registered is not None:
        return registered[0]
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            return list(base.__iter__(value))
    if issubclass(kind, dict):
        return list(dict.values(value))
    if issubclass(kind, _USER):
        return [object.__getattribute__(value, "__dict__").get("data")]
    return _fields(value)


def _flattened(value: Any) -> tuple[list[Any], TreeSpec] | None:
    """Return the items of a value of a registered type, and its spec for rebuilding; None for other types."""
    known = False

    def is_leaf(_: Any) -> bool:
        nonlocal known
        root, known = not known, True
        return not root

    items, spec = tree_flatten(value, is_leaf=is_leaf)
    return None if len(items) == 1 and items[0] is value else (items, spec)


def _fields(value: Any) -> list[Any] | None:
    """Return the values of the fields of a dataclass, or None for any other object.

    The fields are read without running properties and ``__getattr__``, which are user code.
    """
    kind = type(value)
    names = next(
        (
            base.__dict__["__dataclass_fields__"]
            for base in kind.__mro__
            if "__dataclass_fields__" in base.__dict__
        ),
        None,
    )
    if names is None or issubclass(kind, type):
        return None
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    found = []
    for name in names:
        if name in own:
            found.append(own[name])
            continue
        slot = next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)
        if isinstance(slot, MemberDescriptorType):
            try:
                found.append(slot.__get__(value))
            except AttributeError:
                continue  # not assigned
    return found
