"""The properties of torch operators that the dispatch needs, found once per operator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: types of arguments whose numbers are sent as scalars and are not part of a call's key; a number may be
#: passed for a tensor
_NUMERIC = {"number", "float", "Optional[number]", "Optional[float]", "Tensor"}
_NUMERIC_LISTS = {"List[number]"}
#: operators whose result shape depends on such a number
_NUMBER_DEPENDENT_SHAPES = ("aten::arange", "aten::range")
#: position of a result that only the operator's backward reads: scratch memory of the kernel
_OPAQUE = {"aten::mkldnn_rnn_layer": 3}

#: composite operators that nodes run as one: torch does not write to an ``out=`` of a tensor subclass
_RUN_FUSED = frozenset(
    f"aten::linalg_matrix_rank.{overload}"
    for overload in (
        "out", "out_tol_tensor", "atol_rtol_tensor_out", "atol_rtol_float_out"
    )
)  # fmt: skip

#: func, args, kwargs -> result
Special = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class Operator:
    """The properties of an operator.

    Attributes:
        func: the overload.
        name: such as ``aten::add.Tensor``.
        numeric: positions and names of the arguments whose numbers are sent as scalars.
        special: function to run instead of a call on the node, or None.
        opaque: position of a result that only its backward reads; only the node knows its metadata.
        aliasing: whether results may share memory with operands.
        writes: positions and names of the arguments that it writes to.
        random: whether it draws random numbers.
    """

    __slots__ = (
        "aliasing", "func", "name", "numeric", "numeric_lists", "opaque", "random", "special", "writes"
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.opaque = _OPAQUE.get(self.name)
        shaped = schema.name.startswith(_NUMBER_DEPENDENT_SHAPES)
        arguments = list(enumerate(schema.arguments))
        self.numeric = frozenset(
            key for i, a in arguments for key in (i, a.name) if not shaped and str(a.type) in _NUMERIC
        )
        self.numeric_lists = frozenset(
            key for i, a in arguments for key in (i, a.name) if str(a.type) in _NUMERIC_LISTS
        )
        self.special: Special | None = None
        self.aliasing = any(r.alias_info is not None for r in schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.writes = written_arguments(schema)
        if _composed(func.name()) and not _has(func.name(), "CPU") and func.name() not in _RUN_FUSED:
            self.special = decomposed


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _composed(name: str) -> bool:
    return _has(name, "CompositeImplicitAutograd")


def written_arguments(schema: Any) -> frozenset[int | str]:
    """Return the positions and names of the arguments that an operator writes to."""
    return frozenset(
        key
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
        for key in (i, a.name)
    )


def written_arguments_of(name: str) -> frozenset[int | str]:
    """Return :func:`written_arguments` for the operator `name`; empty if this process does not have it."""
    try:
        return written_arguments(find_overload(name)._schema)
    except (AttributeError, RuntimeError):
        return frozenset()


def fused_on_nodes() -> list[str]:
    """Return the operators with a fused CPU kernel that torch decomposes for devices unknown to it."""
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name in _RUN_FUSED or (_composed(name) and _has(name, "CPU"))]


def decomposed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Decompose the operator, as autograd does; in inference mode torch does not."""
    return func.decompose(*args, **kwargs)


def find_overload(name: str) -> Any:
    """Return the overload of a name such as ``aten::add.Tensor``; raises `AttributeError` if unknown."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def function(name: str) -> Callable[..., Any]:
    """Return a function that runs an operator, or that raises if this process has no such operator."""
    if name.startswith("torch_nn::"):  # registered by this module, which torch imports when needed
        importlib.import_module("torch.nn.modules.linear_cross_entropy")
    try:
        return find_overload(name)._op  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError) as error:
        why = error

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"this node has no operator {name}: name the module that registers it in "
            "init_master_worker(imports=[...]), or start the worker with `shoal worker URL --import MODULE`"
        ) from why

    return missing


_known: dict[int, Operator] = {}


def operator(func: Any) -> Operator:
    """Return the properties of an overload; overloads are never freed, so they are found by ``id()``."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = Operator(func)
        found.special = _special.get(found.name, found.special)
    return found


_special: dict[str, Special] = {}


def special(*names: str) -> Callable[[Special], Special]:
    """Decorate a function that replaces these operators."""

    def mark(fn: Special) -> Special:
        _special.update(dict.fromkeys(names, fn))
        return fn

    return mark
