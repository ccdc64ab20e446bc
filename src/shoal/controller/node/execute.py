"""A node's half of a space: tensors, interned calls, and the execution of the log.

An interned call is compiled to a small function over the list of tensors. A failed call stores *poison* as
its results, and so does each call with a poisoned operand; all other calls are executed.
"""

from __future__ import annotations

import contextlib
import pickle
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...common.formatting import describe_error, traceback_of
from ...rpc import current
from ..protocol import commands
from ..protocol.commands import Definition, OperationFailure, Recipe, Template, fill_templates
from ..protocol.copies import copy_to_send
from ..protocol.metadata import format_metadata, is_layout_of, wire_metadata
from ..protocol.operators import function
from . import accelerators, node_operators
from .compilation import CPU, Program, compiled, scalars_of
from .eager import RESIZING, make_resizable, run_with_metadata
from .functions import answer
from .history import BatchReply, Poison, Run, TimedCalls
from .peers import RemoteFailure
from .session_state import SessionEnded, SessionState

#: start of the table of all kernels in torch's error for a missing kernel; it is cut off
_TABLE = "\n\nMeta: registered at "


class PredictionMismatch(Exception):
    """The metadata of a result differs from the master's prediction."""


class SpaceExecutor:
    """The tensors of a space on this node, and the execution of one stream's log on them."""

    def __init__(self, reply: BatchReply, session: SessionState, space: int) -> None:
        self._reply = reply
        self._session = session
        self._space = space
        self._progress = session.progress(space, reply.stream)
        self._tensors = session.tensors(space)
        self._definitions: dict[int, Definition] = {}
        #: calls whose results matched the prediction once
        self._checked_calls: dict[int, tuple[Definition, Any]] = {}
        self._programs: dict[int, Program] = {}
        self._payloads: Sequence[Any] = ()
        self._asked: list[torch.Tensor] = []
        self._called: dict[int, list[torch.Tensor]] = {}
        handlers: dict[int, Run] = {
            commands.FREE: _free, commands.PUT: self._put, commands.FETCH: self._read,
            commands.ITEM: self._read, commands.SEED: self._seed, commands.FORGET: self._forget_calls,
            commands.ASK: self._ask, commands.KEEP: self._keep, commands.STATE: self._state,
            commands.DEFINE: self._define, commands.SHARE: self._share, commands.PROGRAM: self._program,
            commands.ERASE: self._erase, commands.CALL: self._call, commands.TAKE: self._take,
            commands.DROP: self._drop, commands.WAIT: self._wait, commands.RELEASE: self._release,
            commands.MARK: self._mark, commands.EXPECT: self._expect,
        }  # fmt: skip
        self.calls: dict[int, tuple[Run, int, int]] = {
            number: (run, commands.WIDTHS[number], 0) for number, run in handlers.items()
        }

    def run(self, numbers: bytes, scalars: bytes, high: int, payloads: Sequence[Any]) -> None:
        """Execute a segment; ids are below `high`, payloads are definitions, tensors and pickles."""
        a, s = array("I", numbers).tolist(), array("d", scalars).tolist()
        t = self._tensors
        if len(t) < high:
            t.extend([None] * (high - len(t)))
        self._payloads = payloads
        self._reply.recent.begin(self.calls, self._definitions, numbers)
        reach, before = self._progress.reach, self._progress.done
        watched = self._session.has_streams  # a single stream need not report each command
        p = q = 0
        counted, count = 0, 0  # the position up to which interned calls are counted, and their number
        end, timing = len(a), self._session.timing
        calls: dict[int, tuple[Run, int, int]] | TimedCalls = self.calls
        if timing is not None:
            calls = TimedCalls(timing, self._reply, self.calls, self._definitions)
        # Some kernels save values for their backward only with gradients enabled, as they are on the master.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            while p < end:
                try:
                    while p < end:
                        run, width, used = calls[a[p]]
                        run(t, a, p, s, q)
                        p += width
                        q += used
                        if watched:
                            reach(before + p)
                except SessionEnded:
                    raise
                except BaseException as error:  # of user code; this thread gets no KeyboardInterrupt
                    if a[p] not in self.calls:
                        raise
                    while counted < p:
                        count += a[counted] >= commands.FIRST
                        counted += self.calls[a[counted]][1]
                    self._fail(a, p, count, error)
                    p, q = p + self.calls[a[p]][1], q + self.calls[a[p]][2]
                    reach(before + p)
        reach(before + end)
        self._payloads = ()

    # -- failures ------------------------------------------------------------------------------

    def _fail(
        self,
        a: list[int],
        p: int,
        position: int,
        error: BaseException,
        step: int = -1,
        within: list[Any] | None = None,
    ) -> None:
        """Poison the tensors that the command at `p` would have made or changed.

        Args:
            step: index of the step, for a command of a program.
            within: list of tensors for the command's ids, for a command of a program.
        """
        t, number = self._tensors if within is None else within, a[p]
        if number < commands.FIRST:
            self._failed_command(a, p, error)
            return
        program = self._programs.get(number)
        if program is not None:
            self._resume(program, a, p, position, error)
            return
        call = self._definitions[number]
        operands = a[p + 1 : p + 1 + call.operands]
        written = [operands[at] for at in call.written]
        poison = next((t[i] for i in operands if isinstance(t[i], Poison)), None)
        if poison is None:
            operator = call.operator.replace("::", ".")
            alone = not (call.results or call.mutated or written)
            poison = self._poison(position, operator, [t[i] for i in operands], error, alone, step)
        elif call.operator.startswith(node_operators.NAMESPACE):
            with contextlib.suppress(Exception):  # the results are poisoned in any case
                node_operators.propagate_poison(call, poison.failure.poison, poison.failure.of)
        for i in written:
            self._poison_storage(t[i], poison, t)
            t[i] = poison
        for i in a[p + 1 + call.operands : p + self.calls[number][1]]:
            t[i] = poison

    def _resume(self, program: Program, a: list[int], p: int, position: int, error: BaseException) -> None:
        """Execute the steps of a program from the failed one on as single commands, after `error`."""
        recipe = program.recipe
        failed, held = program.failed_step(error)
        made = sum(len(step.results) for step in recipe.steps)
        mine: list[Any] = [None] * (len(recipe.inputs) + len(recipe.outside) + made)
        for slot, value in held.items():
            mine[slot] = value
        for index in range(failed, len(recipe.steps)):
            step = recipe.steps[index]
            if step.numbers[0] == commands.SHARE:
                mine[step.results[0][1]] = mine[step.operands[0][1]]
                continue
            numbers = list(step.numbers)
            for at, slot in (*step.operands, *step.results):
                numbers[at] = slot
            if index > failed:
                try:
                    self.calls[numbers[0]][0](mine, numbers, 0, scalars_of(step), 0)
                    continue
                except SessionEnded:
                    raise
                except BaseException as later:
                    error = later
            self._fail(numbers, 0, position, error, index, mine)
        first = p + 1 + len(recipe.inputs)
        for at, (slot, space) in enumerate(recipe.given):
            self._session.store(space, a[first + at], mine[slot])
        for at, slot in enumerate(recipe.results, len(recipe.given)):
            self._tensors[a[first + at]] = mine[slot]
        for slot, space, id in recipe.kept:
            self._session.store(space, id, mine[slot])

    def _poison(
        self,
        position: int,
        operator: str,
        operands: list[Any],
        error: BaseException,
        alone: bool = False,
        step: int = -1,
    ) -> Poison:
        reply = self._reply
        failure = OperationFailure(
            poison=next(reply.poisons),
            stream=reply.stream,
            batch=reply.batch,
            segment=reply.segment,
            position=position,
            operator=operator,
            operands=", ".join(map(_describe, operands)),
            error=describe_error(error).partition(_TABLE)[0],
            traceback=traceback_of(error, error.__traceback__).partition(_TABLE)[0],
            alone=alone,
            of=(error.node, error.number) if isinstance(error, RemoteFailure) else None,
            step=step,
            before=reply.recent.before(),
        )
        reply.failures.append(failure)
        return Poison(failure)

    def _failed_command(self, a: list[int], p: int, error: BaseException) -> None:
        poison = self._poison(-1, "a command of the master", [], error)
        if a[p] in (commands.PUT, commands.KEEP, commands.TAKE):
            self._tensors[a[p + 1]] = poison
        elif a[p] == commands.SHARE:
            self._session.store(a[p + 3], a[p + 4], poison)
        elif a[p] in (commands.FETCH, commands.ITEM, commands.ASK, commands.CALL, commands.STATE):
            self._reply.add_poison(poison)

    def _poison_storage(self, tensor: object, poison: Poison, among: list[Any]) -> None:
        """Poison all tensors that share memory with `tensor`, in `among` and in all spaces."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()._cdata
        with self._session.lock:  # no id may be released and reused meanwhile
            for tensors in (among, *self._session.tensor_lists()):
                for i, other in enumerate(tensors):
                    if isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == storage:
                        tensors[i] = poison

    # -- calls ---------------------------------------------------------------------------------

    def _resize(self, operator: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        make_resizable(tensor, self._all())
        return operator(tensor, *args, **kwargs)

    def _check(self, definition: Definition, t: list[Any], outputs: list[int]) -> bool:
        """Compare the results with the master's prediction; return whether any had its strides changed.

        A new tensor with other strides than predicted is copied to the predicted strides. A view gets them if
        it shows the same elements with them.

        Raises:
            PredictionMismatch: shape, dtype, or the strides of a view differ.
        """
        restrided = False
        for i, expected in zip(outputs, definition.expected, strict=True):
            if expected is None:
                continue
            given = wire_metadata(t[i])
            if given == expected:
                continue
            if is_layout_of(given, expected):
                t[i] = t[i].as_strided(expected.shape, expected.stride, expected.offset)
                restrided = True
                continue
            laid_out_alike = given._replace(stride=expected.stride, offset=expected.offset)
            if laid_out_alike != expected or definition.aliasing:
                raise PredictionMismatch(
                    f"{definition.operator} returned {_describe(t[i])} with strides {given.stride}, "
                    f"offset {given.offset}, but the master predicted {format_metadata(expected)} with "
                    f"strides {expected.stride}, offset {expected.offset}"
                )
            made = torch.empty_strided(
                expected.shape, expected.stride, dtype=expected.dtype, device=t[i].device
            )
            t[i] = made.copy_(t[i])
            restrided = True
        return restrided

    # -- commands ------------------------------------------------------------------------------

    def _define(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        definition = Definition(*pickle.loads(self._payloads[a[p + 1]]))
        operator = function(definition.operator)
        if definition.operator in RESIZING:
            operator = partial(self._resize, operator)
        if not definition.grad_enabled:
            operator = torch.no_grad()(operator)
        run, scalars = compiled(definition, operator)
        width = 1 + definition.operands + len(definition.results) + len(definition.mutated)
        outputs = 1 + definition.operands

        def first(t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
            run(t, a, p, s, q)
            if self._check(definition, t, a[p + outputs : p + width]):
                self.calls[definition.number] = (again, width, scalars)
            else:
                self.calls[definition.number] = (run, width, scalars)
                self._checked_calls[definition.number] = (definition, operator)

        def again(t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
            run(t, a, p, s, q)
            self._check(definition, t, a[p + outputs : p + width])

        self._definitions[definition.number] = definition
        self.calls[definition.number] = (first, width, scalars)

    def _forget_calls(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        for number in (*self._definitions, *self._programs):
            del self.calls[number]
        self._reply.recent.clear()
        self._definitions.clear()
        self._checked_calls.clear()
        self._programs.clear()

    def _program(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        recipe = Recipe(*pickle.loads(self._payloads[a[p + 1]]))
        program = Program(recipe, self._session, self._tensors, self.calls, self._checked_calls)
        number = recipe.number
        self._programs[number] = program
        self.calls[number] = (program.run, program.width, 0)

    def _erase(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        number = a[p + 1]
        if self._programs.pop(number, None) is not None:  # FORGET may have removed it
            del self.calls[number]

    def _wait(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        node, space, stream, low, high = a[p + 1 : p + 6]
        if node in (commands.EVERY_NODE, self._session.node):
            self._session.wait(space, stream, low | high << 32)

    def _release(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._session.release(t, self._space, a[p + 1], a[p + 2])

    def _mark(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = accelerators.NodeEvent(bool(a[p + 2]))

    def _expect(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._session.await_number(a[p + 1])

    def _put(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = self._payloads[a[p + 2]].to(CPU)

    def _share(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._session.store(a[p + 3], a[p + 4], self._session.tensors(a[p + 1])[a[p + 2]])

    def _read(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        value = t[a[p + 1]]
        if isinstance(value, Poison):
            self._reply.add_poison(value)
        elif a[p] == commands.ITEM:
            self._reply.values.append(("number", value.item()))
        else:
            # copied: the next batch may write to the tensor while the reply is sent
            value = value.resolve_conj().resolve_neg().detach().cpu()
            self._reply.values.append(("tensor", copy_to_send(value, current().agent)))

    def _seed(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        accelerators.seed(a[p + 1] | a[p + 2] << 32)

    def _state(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        state = self._payloads[a[p + 1]]
        if state is None:
            self._reply.values.append(("tensor", accelerators.random_state()))
        else:
            accelerators.set_random_state(state)

    def _ask(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        operator, args, kwargs, ids, scalars = pickle.loads(self._payloads[a[p + 1]])
        operands = [t[id] for id in ids]
        poison = next((each for each in operands if isinstance(each, Poison)), None)
        if poison is not None:
            self._reply.add_poison(poison)
            return

        def device(template: Template) -> torch.device:
            if len(template) > 1:
                return accelerators.device(template[1])
            return operands[0].device if operands else CPU

        given, keyed = fill_templates(args, kwargs, operands, scalars, device)
        try:
            self._asked, answer = run_with_metadata(operator, given, keyed, self._all)
        except BaseException as error:
            poison = self._poison(-1, operator, operands, error)
            self._reply.add_poison(poison)
            return
        self._reply.values.append(("asked", answer))

    def _all(self) -> list[Any]:
        """Return all tensors of the node."""
        with self._session.lock:
            return [each for tensors in self._session.tensor_lists() for each in tensors]

    def _call(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        poisoned: list[Poison] = []

        def tensor(space: int, id: int) -> Any:
            found = self._session.tensors(space)[id]
            if isinstance(found, Poison):
                poisoned.append(found)
            return found

        try:
            value, tensors = answer(self._payloads[a[p + 1]], tensor, poisoned)
        except BaseException as error:
            poison = poisoned[0] if poisoned else self._poison(-1, "call", [], error)
            self._reply.add_poison(poison)
            return
        if tensors:
            self._called[a[p + 2]] = tensors
        self._reply.values.append(("called", (value, [wire_metadata(each) for each in tensors])))

    def _take(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = self._called[a[p + 2]][a[p + 3]]

    def _drop(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._called.pop(a[p + 1], None)

    def _keep(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = self._asked[a[p + 2]]


def _free(t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
    t[a[p + 1]] = None


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return format_metadata(wire_metadata(value))
    return "a poisoned tensor" if isinstance(value, Poison) else repr(value)
