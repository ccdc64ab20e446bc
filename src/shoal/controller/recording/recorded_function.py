"""``master.recorded``: a function whose calls become one command each after two equal recordings.

A call is either a *recording*, which runs the function and listens to the logs, or a *replay*, which runs one
of the function's *programs* on the nodes. :mod:`.recording` compares logs, :mod:`.guards` checks whether a
program is still valid, :mod:`.replay` sends it, and :mod:`..node.compilation` is the nodes' side.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._device import DeviceContext

from ...common.copy_refusal import refuses_copies
from ...errors import RecordingMismatch, UsageError
from ..commands.origin import format_origin
from ..commands.space import Space
from ..tensor import calls
from ..tensor.node_devices import selected_device
from ..tensor.tensor import RemoteTensor, TensorHandle
from .effects import Effects, ReadTracker
from .guards import Grad, Guards, find
from .recording import Name, Recording, difference
from .replay import PROGRAM_DISCARDED, Replay, erase_ended
from .trees import Results, flatten

#: consecutive calls without a replay, and of calls with the same kind of arguments, before it is an error
MAX_DIFFERING_CALLS = 5
#: maximum numbers of kinds of arguments, and of programs per kind
MAX_ARGUMENT_KINDS = 64
MAX_PROGRAMS = 8

_recording = threading.Lock()
#: id of the thread that records
_owner: int | None = None


class _CallKind:
    """The calls with one kind of arguments.

    Attributes:
        programs: their programs, most recently created first.
        last: the last recording, by which gradients were set before it.
        calls: number of recordings since the last program was created.
        total: number of all recordings.
        others: arguments that are compared by identity.
    """

    def __init__(self, others: list[Any]) -> None:
        self.programs: list[Replay] = []
        self.last: dict[tuple[bool, ...], Recording] = {}
        self.calls = self.total = 0
        self.others = others


@refuses_copies("a recorded step", "a program at each node", "Record the function again")
class Recorded:
    """A function whose calls are replayed; created by :meth:`Master.recorded`.

    Attributes:
        recordings: number of calls that ran the function.
        replays: number of replayed calls.
    """

    def __init__(self, fn: Callable[..., Any], spaces: Callable[[], Iterable[Space]]) -> None:
        if not callable(fn):
            raise UsageError(f"{fn!r} cannot be called, so it cannot be recorded")
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
            raise UsageError(f"{fn!r} is a generator function or a coroutine, so it cannot be recorded")
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._spaces = spaces
        self._kinds: OrderedDict[tuple[Any, ...], _CallKind] = OrderedDict()
        self.recordings = self.replays = self._calls_without_replay = 0

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _owner == threading.get_ident() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self._fn(*args, **kwargs)  # called in another recording, or under vmap and the like
        key: list[Any] = [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            selected_device.node,
            selected_device.device,
        ]
        for at in range(torch._C._len_torch_function_stack()):
            mode: Any = torch._C._get_function_stack_at(at)
            key.append(mode.device if isinstance(mode, DeviceContext) else id(mode))
        leaves: list[Any] = []
        others: list[Any] = []
        flatten((args, kwargs), key, leaves, others)
        name = tuple(key)
        kind = self._kinds.get(name)
        if kind is not None:
            for program in kind.programs:
                if program.matches(leaves):
                    result = program(leaves)
                    if result is not PROGRAM_DISCARDED:
                        self.replays += 1
                        self._calls_without_replay = 0
                        return result
        if not _recording.acquire(blocking=False):
            return self._fn(*args, **kwargs)  # another thread is recording
        try:
            if kind is None:
                kind = self._kinds[name] = _CallKind(others)
                if len(self._kinds) > MAX_ARGUMENT_KINDS:
                    self._evict_oldest_kind()
            self._kinds.move_to_end(name)
            return self._record(kind, args, kwargs, leaves)
        finally:
            _recording.release()

    def _evict_oldest_kind(self) -> None:
        """Discard the kind of arguments whose last recording is the oldest."""
        if all(each.total <= 1 for each in self._kinds.values()):
            raise RecordingMismatch(
                f"{len(self._kinds)} calls of a recorded step all had different arguments: tensors are "
                "compared by metadata, numbers by value, and objects by identity; pass the tensors of an "
                "object instead of the object, and a number that changes in every call as a tensor"
            )
        self._kinds.popitem(last=False)

    def _record(self, kind: _CallKind, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        roots = [("the function", self._fn), *((f"argument {i}", each) for i, each in enumerate(kind.others))]
        before = find(roots)
        spaces = list(self._spaces())
        recording = self._new_recording(spaces, leaves, before.handles)
        had_grads = before.release_grads()
        effects = Effects(leaves)
        watch = ReadTracker(leaves) if any(type(each) is not RemoteTensor for each in leaves) else None
        with _listening(recording, spaces):
            with watch or contextlib.nullcontext():
                result = self._fn(*args, **kwargs)
            recording.read = frozenset() if watch is None else frozenset(watch.read)
            if recording.refusal is not None:
                raise recording.refusal  # the function caught the exception
            self.recordings += 1
            kind.total += 1
            if not recording.commands or spaces != list(self._spaces()):
                return result  # no nodes involved, or nodes joined whose commands were not recorded
            kind.calls += 1
            self._calls_without_replay += 1
            after = find(roots)
            gradients = {handle for _, _, handle in after.grads if handle is not None}
            results = Results(recording, result, leaves, gradients)
            recording.constants = results.constants
            recording.generator = effects.generator()
            state = tuple(grad is not None for grad in had_grads.values())
            previous = kind.last.get(state)
            kind.last[state] = recording
            reason = None if previous is None else _refusal(previous, recording, results, after, had_grads)
            reason = reason or after.describe_call_effects(before)
            reason = reason or effects.changed(
                recording.generator, None if previous is None else previous.generator
            )
            if reason is not None and min(kind.calls, self._calls_without_replay) >= MAX_DIFFERING_CALLS:
                raise RecordingMismatch(f"{MAX_DIFFERING_CALLS} calls of a recorded step differed: {reason}")
            if previous is None or reason is not None or recording.forgotten:
                return result
            del result
            written = after.written(before), effects.written()
            return self._create_program(kind, recording, results, after, had_grads, leaves, written)

    def _new_recording(
        self, spaces: Sequence[Space], leaves: Sequence[Any], handles: set[TensorHandle]
    ) -> Recording:
        inputs: dict[tuple[int, int], Name] = {}
        uploads: list[tuple[int, torch.Tensor]] = []
        for i, leaf in enumerate(leaves):
            if type(leaf) is not RemoteTensor:
                uploads.append((i, leaf))
            elif leaf.handle not in handles and leaf.handle.space in spaces:
                if leaf.requires_grad:
                    raise RecordingMismatch(
                        f"tensor {i} among the arguments of a recorded step is a result that requires a "
                        "gradient, and a replay has no graph of it: detach() it, or compute it inside"
                    )
                inputs.setdefault((leaf.handle.space.number, leaf.handle.id), ("input", i))
        return Recording(spaces, inputs, uploads)

    def _create_program(
        self,
        kind: _CallKind,
        recording: Recording,
        results: Results,
        guards: Guards,
        had_grads: dict[int, Grad | None],
        leaves: Sequence[Any],
        written: tuple[list[RemoteTensor], list[int]],
    ) -> Any:
        """Create a program; return the call's result, without a graph, as replays return it."""
        spaces = list(recording.spaces.values())
        lock = next((space.lock for space in spaces), contextlib.nullcontext())
        with lock:
            if any(
                len(space.calls) + len(recording.commands) >= calls.MAX_INTERNED_CALLS for space in spaces
            ):
                for space in spaces:
                    space.forget()  # makes room for programs
                kind.last.clear()
            else:
                erase_ended()
                kind.programs.insert(0, Replay(recording, guards, had_grads, leaves, results, written))
                del kind.programs[MAX_PROGRAMS:]
                kind.calls = 0
            return results.build(results.handles, leaves)


@contextlib.contextmanager
def _listening(recording: Recording, spaces: Iterable[Space]) -> Iterator[None]:
    global _owner
    heard = list(spaces)
    streams = next((space.ordering for space in heard if space.ordering is not None), None)
    _owner = threading.get_ident()
    for space in heard:
        space.listener = recording
    try:
        with contextlib.nullcontext() if streams is None else streams.by_default(heard):
            yield
    finally:
        for space in heard:
            space.listener = None
        _owner = None


def _refusal(
    previous: Recording,
    recording: Recording,
    results: Results,
    after: Guards,
    had_grads: dict[int, Grad | None],
) -> str | None:
    """Describe why a call cannot be replayed or differs from the previous one, or return None."""

    reason = difference(previous, recording)
    if reason is not None:
        return reason
    if results.differ(previous.constants):
        return "it returns values other than tensors of nodes that differ from call to call"
    if not all(id(tensor) in had_grads for tensor, _, _ in after.grads):
        return "it creates new parameters in every call"
    known = {recording.place(each) for each in after.handles}
    known |= {grad.place for grad in had_grads.values() if grad is not None and grad.tensor is not None}
    for command, origin in zip(recording.commands, recording.origins, strict=True):
        for _, name in command.operands:
            if name[0] == "outside" and (name[1:] not in known or name[1:] in recording.names):
                return (
                    f"{recording.operator(command)} at {format_origin(origin)} uses a tensor that is not "
                    "an argument and was not found among the objects that the function uses, or that is "
                    "created in every call: pass it as an argument"
                )
    if any(name[0] == "number" for name in recording.names.values() if name in results.handles):
        return "it returns a number of the master that it moved to a node"
    return None
