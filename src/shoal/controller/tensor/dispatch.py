"""Dispatch of operations on nodes' tensors, below autograd: each becomes a command in a node's log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ...errors import DeviceMismatch, UsageError
from ..commands.interrupts import uncut
from ..commands.space import Space
from ..commands.storage import Storage
from ..protocol.metadata import metadata, told
from ..protocol.operators import Operator, operator
from . import current, tensor
from .autograd import of_thread, prepare_thread
from .calls import ASKED, InternedCall, collect, intern, templates, written_operands
from .ordering import Streams
from .tensor import RemoteTensor, TensorHandle, rebind, share, wrap
from .within import Within, chosen, within

#: size in bytes from which a tensor of the master is sent without copying it first
_LARGE = 2**20


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Issue an operation and return its results without waiting."""
    if not hasattr(of_thread, "prepared"):
        prepare_thread()
    op = operator(func)
    if op.special is not None:
        result = op.special(func, args, kwargs)
        if result is not NotImplemented:
            return result
    key: list[Any] = [op] if op.opaque is None else [op, torch.is_grad_enabled()]
    operands: list[RemoteTensor] = []
    scalars: list[float] = []
    if not collect(op, args, kwargs, key, operands, scalars):
        return dispatch(func, *_brought(op, args, kwargs))
    if operands:
        space = operands[0].handle.space
    else:
        space = _space_of(kwargs)
        at = chosen.on(space)
        if at >= 0:
            kwargs = {**kwargs, "device": within(at)}
            key.append(at)
    with space.lock:
        if space.ordering is not None:
            return _on_stream(space, op, key, args, kwargs, operands, scalars)
        call = space.calls.get(tuple(key))
        if call is None:
            elsewhere = _made_elsewhere(space, func, args, kwargs)
            if elsewhere is not None:
                return elsewhere
            call = intern(space, op, key, args, kwargs, operands, scalars)
        if call is ASKED:
            return _ask(space, op, args, kwargs, operands, scalars)
        return _issued(space, call, operands, scalars)


@uncut
def _issued(space: Space, call: InternedCall, operands: Sequence[RemoteTensor], scalars: list[float]) -> Any:
    ids = space.issue(call.number, [each.handle.id for each in operands], scalars, call.count)
    if call.single:
        handle = TensorHandle(space, ids[0], call.results[0])
        if call.shows is not None:
            handle.storage = operands[call.shows].handle.memory()
        return share(handle)
    if call.in_place:
        return operands[0]
    return _returned(space, call, ids, operands, Storage)


def _on_stream(
    space: Space,
    op: Operator,
    key: list[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[RemoteTensor],
    scalars: list[float],
) -> Any:
    """Issue an operation on the current stream of this thread."""
    streams = cast(Streams, space.ordering)
    log = streams.current(space)
    storages = [each.handle.memory() for each in operands]
    call = log.calls.get(tuple(key))
    if call is None:
        elsewhere = _made_elsewhere(space, op.func, args, kwargs)
        if elsewhere is not None:
            return elsewhere
        call = intern(log, op, key, args, kwargs, operands, scalars)
    if call is ASKED:
        written = storages + (streams.generators(log) if op.random else [])
        with streams.using(log, [each.handle.id for each in operands], storages, written):
            return _ask(log, op, args, kwargs, operands, scalars)
    return _issued_to(log, call, operands, storages, scalars)


@uncut
def _issued_to(
    log: Space,
    call: InternedCall,
    operands: Sequence[RemoteTensor],
    storages: Sequence[Storage],
    scalars: list[float],
) -> Any:
    streams = cast(Streams, log.ordering)
    ids = streams.issue(log, call, [each.handle.id for each in operands], storages, scalars)
    if call.in_place:
        return operands[0]
    if call.single and call.shows is None:
        handle = TensorHandle(log.home, ids[0], call.results[0])
        handle.storage = streams.made(log)
        return share(handle)
    return _returned(log, call, ids, operands, partial(streams.made, log))


def _returned(
    space: Space,
    call: InternedCall,
    ids: list[int],
    operands: Sequence[RemoteTensor],
    new: Callable[[], Storage],
) -> Any:
    storages: dict[int, Storage] = {}
    handles = []
    for id, known, shown in zip(
        ids, [*call.results, *(known for _, known in call.mutated)], call.memory, strict=True
    ):
        handle = TensorHandle(space.home, id, known)
        if shown < len(operands):
            storage = handle.storage = operands[shown].handle.memory()
            if space.ordering is not None:
                storage.past.views[space.number, id] = space, space.position
        else:
            if shown not in storages:
                storages[shown] = new()
            handle.storage = storages[shown]
        handles.append(handle)
    made = [share(handle) for handle in handles[: len(call.results)]]
    if call.proves:
        made[-1].handle.proved = handles[: len(made) - 1]
    for handle, (at, _) in zip(handles[len(made) :], call.mutated, strict=True):
        rebind(operands[at], handle)

    return _rebuilt(call.returned, made, operands)


def _rebuilt(
    returned: tuple[Any, ...], made: Sequence[RemoteTensor], operands: Sequence[RemoteTensor]
) -> Any:
    """The return value of a call. Not a closure: a recursive one would keep the tensors in a cycle."""
    kind, value = returned
    if kind == "new":
        return made[value]
    if kind == "operand":
        return operands[value]
    if kind == "constant":
        return value
    parts = [_rebuilt(each, made, operands) for each in value]
    return parts if kind == "list" else tuple(parts)


@uncut
def _ask(
    space: Space,
    op: Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[RemoteTensor],
    scalars: Sequence[float],
) -> Any:
    """Run an operation whose results only the node can determine, and wait for their metadata."""
    if current.master().strict:
        raise UsageError(
            f"{op.name} would wait for {space.nodes}, because the shape of its result is known only there, "
            "and the master is strict: use an operation whose shape is known, like torch.where for x[mask], "
            "or set master.strict to False around it"
        )
    given, named = templates(op, args, kwargs)
    answer = space.ask(op.name, given, named, [each.handle.id for each in operands], scalars)
    # Operands that it writes to may have new shapes, which the node reports with the result.
    result, *changed = answer[1] if op.writes else [answer]
    targets = [operands[each] for each in written_operands(op, args, kwargs)]
    position = len(changed)

    def rebuilt(answer: tuple[Any, ...]) -> Any:
        nonlocal position
        kind, value = answer
        if kind == "tensor":
            position += 1
            made = wrap(space.home, space.keep(position - 1), metadata(space.device, value))
            if op.aliasing and operands:
                made.handle.storage = operands[0].handle.memory()
            elif space.ordering is not None:
                made.handle.storage = space.ordering.made(space)
            return made
        if kind == "written":
            return targets[value]
        return tuple(rebuilt(each) for each in value) if kind == "list" else value

    for i, (target, (_, value)) in enumerate(zip(targets, changed, strict=True)):
        known = metadata(space.device, value)
        if known is not target.handle.metadata:
            handle = TensorHandle(space.home, space.keep(i), known)
            handle.storage = target.handle.memory()
            rebind(target, handle)
    return rebuilt(result)


def _space_of(kwargs: dict[str, Any]) -> Space:
    device = kwargs.get("device")
    return current.master().space(0 if device is None or device.index is None else device.index)


def _made_elsewhere(space: Space, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a factory whose device differs from its operand's, such as ``zeros_like(x, device="cpu")``."""
    device = kwargs.get("device")
    if (
        device is None
        or type(device) is Within
        or device.index == space.index
        or (device.type == "node" and device.index is None)
    ):
        return None

    def there(value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return value

    return func(*[there(each) for each in args], **kwargs)


def _brought(op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with zero-dimensional tensors of the master copied to the others' node."""
    space = next((each.handle.space for each in _tensors(args, kwargs) if type(each) is RemoteTensor), None)
    if space is None:
        space = _space_of(kwargs)

    def brought(value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [brought(each, name) for each in value]
        if not isinstance(value, torch.Tensor) or type(value) is RemoteTensor:
            return value
        if value.layout != torch.strided:
            raise DeviceMismatch(
                f"{op.name}: {name} is {value.layout} on {value.device}, and nodes hold dense tensors: use "
                f".to_dense().to({str(space.device)!r})"
            )
        # As with every torch device, zero-dimensional tensors and indices may be on the CPU.
        alien = (value.dim() and name != "indices") or name in op.writes
        if alien or value.device.type != "cpu":
            raise mismatch(op.name, name, value, space.device)
        return upload(space, value)

    names = [a.name for a in op.func._schema.arguments]
    return (
        [brought(each, names[i]) for i, each in enumerate(args)],
        {name: brought(each, name) for name, each in kwargs.items()},
    )


def mismatch(operator: str, name: str, value: torch.Tensor, device: torch.device) -> DeviceMismatch:
    """The error for an argument that is on another device than the operator's other tensors."""
    dtype = str(value.dtype).removeprefix("torch.")
    return DeviceMismatch(
        f"{operator}: {name} is {dtype}{list(value.shape)} on {value.device}, and other tensors are "
        f"on {device}: move them to one device, with .to({str(device)!r}) or .cpu()"
    )


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        parts = value if isinstance(value, (list, tuple)) else (value,)
        flat += [each for each in parts if isinstance(each, torch.Tensor)]
    return flat


def upload(
    space: Space, value: torch.Tensor, to: RemoteTensor | None = None, waits: bool = True
) -> RemoteTensor:
    """Copy a tensor of the master to a node.

    Args:
        to: the destination tensor. If it was created by the previous command, as in ``x.to(device)``, the
            upload replaces its creation and `to` is returned.
        waits: wait until `value` may be modified. Otherwise the caller must wait for the node before that.
    """
    source = value.detach().resolve_conj().resolve_neg()
    # In lent memory sending is copying, so a large tensor is sent without a copy, and immediately.
    as_it_is = source.nbytes >= _LARGE and source.is_contiguous() and not source.storage_offset()
    if not as_it_is:
        source = source.clone()
    with space.lock:
        log = space if space.ordering is None else space.ordering.current(space)
        made = _uploaded(space, log, source, value, to)
        if as_it_is:
            log.flush()
        sent = [batch for line in log.lines for batch in line.batches] if as_it_is and waits else []
    for batch in sent:
        batch.wait_until_read()
    return made


@uncut
def _uploaded(
    space: Space, log: Space, source: torch.Tensor, value: torch.Tensor, to: RemoteTensor | None
) -> RemoteTensor:
    """Append the upload of `source`, a copy of `value`, to a log; the caller holds the lock."""
    known = metadata(space.device, told(source))
    # Whether `to` is blank depends on timing (the last command), and a recording must be deterministic.
    blank = to is not None and to.handle.metadata is known and log.is_blank(to.handle.id)
    if to is not None and blank and space.listener is None:
        log.put(source, to.handle.id)
        made = to
    else:
        made = wrap(space, log.put(source), known)
    if space.ordering is not None:
        made.handle.storage = space.ordering.made(log)
    if space.listener is not None:
        space.listener.uploaded(space, made.handle.id, value)
    return made


tensor.RemoteTensor.issue = staticmethod(dispatch)
