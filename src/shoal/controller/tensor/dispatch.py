"""Dispatch of operations on nodes' tensors, below autograd: each becomes a command in a node's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import DeviceMismatch, UsageError
from ..commands.interrupts import defer_interrupt
from ..commands.space import Space
from ..commands.storage import Storage
from ..protocol.commands import KEEP
from ..protocol.metadata import format_metadata, metadata, wire_metadata
from ..protocol.operators import operator
from . import current, tensor
from .autograd import of_thread, prepare_thread
from .calls import NODE_DETERMINED, InternedCall, intern
from .node_devices import NodeDevice, selected_device
from .operator_call import OperatorCall
from .tensor import RemoteTensor, TensorHandle, new_tensor, rebind, wrap

#: size in bytes from which a tensor of the master is sent without copying it first
MIN_ZERO_COPY_BYTES = 2**20


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Issue an operation and return its results without waiting."""
    if not hasattr(of_thread, "prepared"):
        prepare_thread()
    op = operator(func)
    if op.special is not None:
        result = op.special(func, args, kwargs)
        if result is not NotImplemented:
            return result
    operation = OperatorCall(op, args, kwargs)
    if not operation.is_remote:
        return dispatch(func, *_with_uploaded_scalars(operation))
    if operation.operands:
        space = operation.operands[0].handle.space
    else:
        space = _space_of(kwargs)
        device = selected_device.on(space)
        if device >= 0:
            operation.use_device(device)
    with space.lock:
        log = space if space.ordering is None else space.ordering.current(space)
        call = log.calls.get(tuple(operation.key))
        if call is None:
            elsewhere = _factory_on_other_device(space, operation)
            if elsewhere is not None:
                return elsewhere
            call = intern(log, operation)
        if call is NODE_DETERMINED:
            return _run_on_node(log, operation)
        return _issue(log, call, operation)


@defer_interrupt
def _issue(log: Space, call: InternedCall, operation: OperatorCall) -> Any:
    """Append an interned call to the log of a stream, and return its results."""
    streams = log.ordering
    if streams is None:
        ids = log.issue(call.number, operation.ids, operation.scalars, call.count)
    else:
        ids = streams.issue(log, call, operation)
    if call.in_place:
        return operation.operands[0]
    if call.single and (streams is None or call.view_of is None):
        handle = TensorHandle(log.home, ids[0], call.results[0])
        if streams is not None:
            handle.storage = streams.made(log)
        elif call.view_of is not None:
            handle.storage = operation.operands[call.view_of].handle.memory()
        return new_tensor(handle)
    return _results(log, call, ids, operation.operands)


def _results(log: Space, call: InternedCall, ids: list[int], operands: Sequence[RemoteTensor]) -> Any:
    streams = log.ordering
    storages: dict[int, Storage] = {}
    handles = []
    for id, known, shown in zip(
        ids, [*call.results, *(known for _, known in call.mutated)], call.memory, strict=True
    ):
        handle = TensorHandle(log.home, id, known)
        if shown < len(operands):
            handle.storage = operands[shown].handle.memory()
            if streams is not None:
                handle.storage.past.views[log.number, id] = log, log.position
        else:
            if shown not in storages:
                storages[shown] = Storage() if streams is None else streams.made(log)
            handle.storage = storages[shown]
        handles.append(handle)
    made = [new_tensor(handle) for handle in handles[: len(call.results)]]
    if call.reports_success:
        made[-1].handle.checked_results = handles[: len(made) - 1]
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


def _run_on_node(log: Space, operation: OperatorCall) -> Any:
    """Run an operation whose results only the node can determine, and wait for their metadata."""
    if current.master().strict:
        raise UsageError(
            f"{operation.op.name} would wait for {log.nodes}, because the shape of its result is known only "
            "there, and the master is strict: use an operation whose shape is known, like torch.where for "
            "x[mask], or set master.strict to False around it"
        )
    streams = log.ordering
    if streams is None:
        return _ask(log, operation)
    storages = operation.storages()
    written = storages + (streams.generators(log) if operation.op.random else [])
    with streams.using(log, operation.ids, storages, written):
        return _ask(log, operation)


@defer_interrupt
def _ask(space: Space, operation: OperatorCall) -> Any:
    op, operands = operation.op, operation.operands
    args, kwargs = operation.templates()
    answer = space.ask(op.name, args, kwargs, operation.ids, operation.scalars)
    # Operands that it writes to may have new shapes, which the node reports with the result.
    result, *changed = answer[1] if op.writes else [answer]
    targets = [operands[each] for each in operation.written()]
    position = len(changed)

    def rebuilt(answer: tuple[Any, ...]) -> Any:
        nonlocal position
        kind, value = answer
        if kind == "tensor":
            position += 1
            made = wrap(space.home, space.make(KEEP, position - 1), metadata(space.device, value))
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
            handle = TensorHandle(space.home, space.make(KEEP, i), known)
            handle.storage = target.handle.memory()
            rebind(target, handle)
    return rebuilt(result)


def _space_of(kwargs: dict[str, Any]) -> Space:
    device = kwargs.get("device")
    return current.master().space(0 if device is None or device.index is None else device.index)


def _factory_on_other_device(space: Space, operation: OperatorCall) -> Any:
    """Run a factory whose device differs from its operand's, such as ``zeros_like(x, device="cpu")``."""
    device = operation.kwargs.get("device")
    if (
        device is None
        or type(device) is NodeDevice
        or device.index == space.index
        or (device.type == "node" and device.index is None)
    ):
        return None

    def there(value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return value

    return operation.op.func(*[there(each) for each in operation.args], **operation.kwargs)


def _with_uploaded_scalars(operation: OperatorCall) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with zero-dimensional tensors of the master copied to the others' node."""
    op, args, kwargs = operation.op, operation.args, operation.kwargs
    space = next((each.handle.space for each in operation.tensors() if type(each) is RemoteTensor), None)
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
    return DeviceMismatch(
        f"{operator}: {name} is {format_metadata(value)} on {value.device}, and other tensors are "
        f"on {device}: move them to one device, with .to({str(device)!r}) or .cpu()"
    )


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
    as_it_is = source.nbytes >= MIN_ZERO_COPY_BYTES and source.is_contiguous() and not source.storage_offset()
    if not as_it_is:
        source = source.clone()
    with space.lock:
        log = space if space.ordering is None else space.ordering.current(space)
        made = _uploaded(space, log, source, value, to)
        if as_it_is:
            log.flush()
        sent = (
            [batch for connection in log.connections for batch in connection.batches]
            if as_it_is and waits
            else []
        )
    for batch in sent:
        batch.wait_until_read()
    return made


@defer_interrupt
def _uploaded(
    space: Space, log: Space, source: torch.Tensor, value: torch.Tensor, to: RemoteTensor | None
) -> RemoteTensor:
    """Append the upload of `source`, a copy of `value`, to a log; the caller holds the lock."""
    known = metadata(space.device, wire_metadata(source))
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
