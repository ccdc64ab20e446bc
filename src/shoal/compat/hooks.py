"""Torch's operation hooks for groups of shoal (torch 2.14 and later).

Torch's dispatcher calls hooks, but calls of a Python group bypass the dispatcher.  So a group of shoal has an
:class:`OperationHooks`, which calls hooks in the same order and with the same arguments.  The decorator of
each method (:mod:`shoal.compat.routing`) describes these arguments in a :class:`HookedOperation`.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ..common import torch_features
from ..errors import UsageError
from .tensor_arguments import every_tensor

if TYPE_CHECKING:
    from .process_group import TorchProcessGroup

#: a function of torch's ``PreHookArgs`` or ``PostHookArgs``
Hook = Callable[[Any], None]
HookKind = Literal["pre", "post"]

#: ids of NaN checks; they start as in torch, above the small ids that users choose
_nan_check_ids = itertools.count(0x4E414E43)


class HookedOperation:
    """The description of one method of a group for hooks.

    Args:
        method: the group's method.
        name: the operation in torch's ``HookOpName`` (torch 2.15; earlier releases have fewer names).
        inputs: parameter with the tensors that this rank sends, or "".
        outputs: parameter with the tensors that this rank receives, or "".
        root: parameter with the rank of the root or peer; ``opts``: the root is in torch's options; "": none,
            and hooks get -1.
    """

    def __init__(
        self, method: Callable[..., Any], name: str, inputs: str = "", outputs: str = "", root: str = ""
    ) -> None:
        self.name = name
        self._signature = inspect.signature(method)
        self._inputs, self._outputs, self._root = inputs, outputs, root

    def arguments(self, group: TorchProcessGroup, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return torch's ``PreHookArgs`` for a call of the method on ``group``, without an ``op_id``."""
        given = self._signature.bind(group, *args, **kwargs).arguments
        opts = given.get("opts")
        types = torch_features.hook_types()
        seen = types.before()
        seen.name = types.operation(self.name)
        seen.async_op = getattr(opts, "asyncOp", True)
        seen.input_tensors = every_tensor(given.get(self._inputs))
        seen.output_tensors = every_tensor(given.get(self._outputs))
        if self._root == "opts":
            seen.root = group._options(opts, root=given.get("root"))[1]
        elif self._root:
            seen.root = given[self._root]
        return seen


class OperationHooks:
    """The hooks of one group."""

    def __init__(self) -> None:
        #: By kind the hooks, ordered by id.  The inner dictionaries are replaced and never changed, because
        #: operations may be using them.
        self._hooks: dict[HookKind, dict[int, Hook]] = {"pre": {}, "post": {}}
        self._ids = itertools.count()

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    def register(self, kind: HookKind, hook_id: int, hook: Hook) -> None:
        """Call ``hook`` before or after each operation is issued; replaces a hook with the same id."""
        torch_features.hook_types()  # raises if this torch has no hooks
        if not hasattr(hook_id, "__index__") or not callable(hook):
            raise UsageError(
                f"register_{kind}_hook: expected an int and a function, got {hook_id!r} and {hook!r}"
            )
        hooks = {**self._hooks[kind], operator.index(hook_id): hook}
        self._hooks[kind] = dict(sorted(hooks.items()))

    def unregister(self, kind: HookKind, hook_id: int) -> None:
        """Remove the hook with this id, if any."""
        self._hooks[kind] = {number: hook for number, hook in self._hooks[kind].items() if number != hook_id}

    def around(
        self,
        operation: HookedOperation,
        issue: Callable[..., Any],
        group: TorchProcessGroup,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call the hooks before an operation, issue it, call the hooks after it, and return its work.

        Hooks are called in the order of their ids.  An exception of a hook propagates to the caller.  If a
        hook before the operation raises, the operation is not issued and later hooks are not called.
        """
        number = next(self._ids)
        seen = operation.arguments(group, args, kwargs)
        seen.op_id = number
        for hook in self._hooks["pre"].values():
            hook(seen)
        work = issue(group, *args, **kwargs)
        if after := self._hooks["post"]:
            done = torch_features.hook_types().after()
            done.name, done.async_op, done.work, done.op_id = seen.name, seen.async_op, work, number
            for hook in after.values():
                hook(done)
        return work


class NanCheck:
    """A check of all tensors that a group sends for NaN; the result of ``NanCheckHook.attach``.

    The group owns the check; this object is needed only for :meth:`remove`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._rank = group.rank()
        self._hook_id = next(_nan_check_ids)
        names = torch_features.hook_types().operation
        self._from_root = (names("BROADCAST"), names("SCATTER"))
        group.register_pre_hook(self._hook_id, self._check)  # type: ignore[attr-defined] # torch 2.14

    def remove(self) -> None:
        """Stop checking.  Idempotent."""
        if (group := self._group()) is not None:
            group.unregister_pre_hook(self._hook_id)  # type: ignore[attr-defined] # torch 2.14

    def _check(self, seen: Any) -> None:
        if seen.name in self._from_root and seen.root != self._rank:
            return  # on this rank the tensor is an output
        for x in seen.input_tensors:
            if not x.is_floating_point():
                continue
            try:
                torch.ops.c10d.check_for_nan(x.coalesce().values() if x.is_sparse else x)
            except RuntimeError as error:
                raise UsageError(
                    f"{seen.name.name} on rank {self._rank}: {error} The tensor has shape {list(x.shape)}; "
                    "nothing was sent. NanCheckHook.attach or TORCH_DIST_NAN_CHECK=1 asked for this check"
                ) from error
