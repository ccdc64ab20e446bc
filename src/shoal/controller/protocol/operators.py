"""The facts of each operator of torch that the dispatch needs, found once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: marks arguments whose numbers travel as operands, and are no part of a call's key; a number may be given in
#: the place of a tensor
_NUMERIC = {"number", "float", "Optional[number]", "Optional[float]", "Tensor"}
_NUMERIC_LISTS = {"List[number]"}
#: operators whose results have a shape that depends on such a value
_SHAPED = ("aten::arange", "aten::range")
#: the position of a result that only the operator's backward reads: scratch memory of the kernel
_OPAQUE = {"aten::mkldnn_rnn_layer": 3}

#: operators whose ``out=`` torch does not write to if it is of a class of tensors: nodes run them as one
_WHOLE = frozenset(
    f"aten::linalg_matrix_rank.{overload}"
    for overload in (
        "out", "out_tol_tensor", "atol_rtol_tensor_out", "atol_rtol_float_out"
    )
)  # fmt: skip
#: modules that register operators, and are imported where one is used first
_REGISTERING = {
    "torch_nn": "torch.nn.modules.linear_cross_entropy", "shoal_check": "shoal.controller.node.checks"
}  # fmt: skip

#: func, args, kwargs -> result
Special = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class Operator:
    """An operator, by its schema.

    Attributes:
        func: the overload.
        name: ``aten::add.Tensor``.
        numeric: positions and names of the arguments whose numbers travel as operands.
        special: does it in the place of a call to the node; None: nothing does.
        opaque: position of the result that only its backward reads, of a form that only the node knows.
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
        shaped = schema.name.startswith(_SHAPED)
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
        self.writes = written(schema)
        if _composed(func.name()) and not _has(func.name(), "CPU") and func.name() not in _WHOLE:
            self.special = decomposed


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _composed(name: str) -> bool:
    return _has(name, "CompositeImplicitAutograd")


def written(schema: Any) -> frozenset[int | str]:
    """The positions and names of the arguments that an operator writes to."""
    return frozenset(
        key
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
        for key in (i, a.name)
    )


def written_by(name: str) -> frozenset[int | str] | None:
    """The same of an operator by its name; None: this process has none of that name."""
    try:
        return written(named(name)._schema)
    except (AttributeError, RuntimeError):
        return None


def fused_on_nodes() -> list[str]:
    """Operators that torch computes as one on the CPU, and of others on devices that it does not know."""
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name in _WHOLE or (_composed(name) and _has(name, "CPU"))]


def decomposed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run what torch makes of the operator: autograd does so, and inference mode does not."""
    return func.decompose(*args, **kwargs)


def named(name: str) -> Any:
    """The overload ``aten::add.Tensor``.

    Raises:
        AttributeError: this process has none of that name.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def function(name: str) -> Callable[..., Any]:
    """A function that runs an operator, or raises that this process has none of that name."""
    registering = _REGISTERING.get(name.partition("::")[0])
    if registering is not None:
        importlib.import_module(registering)
    try:
        return named(name)._op  # type: ignore[no-any-return]
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
    """The facts of an overload, which is never freed."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = Operator(func)
        found.special = _special.get(found.name, found.special)
    return found


_special: dict[str, Special] = {}


def special(*names: str) -> Callable[[Special], Special]:
    """Decorates what is done in the place of these operators."""

    def mark(fn: Special) -> Special:
        _special.update(dict.fromkeys(names, fn))
        return fn

    return mark
