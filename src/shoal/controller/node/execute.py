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

from ...common import formatting
from ..protocol.commands import (
    ASK,
    CALL,
    DEFINE,
    DROP,
    ERASE,
    EVERY_NODE,
    EXPECT,
    FETCH,
    FIRST,
    FORGET,
    FREE,
    ITEM,
    KEEP,
    MARK,
    PROGRAM,
    PUT,
    RELEASE,
    SEED,
    SHARE,
    STATE,
    TAKE,
    WAIT,
    WIDTHS,
    Definition,
    OperationFailure,
    Recipe,
    Template,
    filled,
)
from ..protocol.metadata import in_words, is_layout_of, told
from ..protocol.operators import function, written_by
from . import accelerators, between
from .asking import run_asked
from .compiled import Run, compiled
from .functions import answer
from .growing import GROWING, let_grow
from .mark import Mark
from .memory import NodeMemory, SessionEnded
from .outcome import BatchReply, Poison
from .peers import Elsewhere
from .program import Program

#: start of the table of all kernels in torch's error for a missing kernel; it is cut off
_TABLE = "\n\nMeta: registered at "


class Unexpected(Exception):
    """The metadata of a result differs from the master's prediction."""


class Tensors:
    """The tensors of a space on this node, and the execution of one stream's log on them."""

    def __init__(
        self, device: torch.device, outcome: BatchReply, memory: NodeMemory, space: int, stream: int
    ) -> None:
        self.device = device
        self._outcome = outcome
        self._memory = memory
        self._space = space
        self._progress = memory.progress(space, stream)
        self.tensors = memory.tensors(space)
        self._definitions: dict[int, Definition] = {}
        self.plain: dict[int, tuple[Definition, Any]] = {}  # calls whose results matched the prediction once
        self._programs: dict[int, Program] = {}
        self._payloads: Sequence[Any] = ()
        self._asked: list[torch.Tensor] = []
        self._called: dict[int, list[torch.Tensor]] = {}
        commands = {
            FREE: _free,
            PUT: self._put,
            FETCH: self._fetch,
            ITEM: self._item,
            SEED: self._seed,
            FORGET: self._forget_calls,
            ASK: self._ask,
            KEEP: self._keep,
            STATE: self._state,
            DEFINE: self._define,
            SHARE: self._share,
            PROGRAM: self._program,
            ERASE: self._erase,
            CALL: self._call,
            TAKE: self._take,
            DROP: self._drop,
            WAIT: self._wait,
            RELEASE: self._release,
            MARK: self._mark,
            EXPECT: self._expect,
        }
        self.calls: dict[int, tuple[Run, int, int]] = {
            number: (run, WIDTHS[number], 0) for number, run in commands.items()
        }

    def run(self, numbers: bytes, scalars: bytes, high: int, payloads: Sequence[Any]) -> None:
        """Execute a segment; ids are below `high`, payloads are definitions, tensors and pickles."""
        a, s = array("I", numbers).tolist(), array("d", scalars).tolist()
        t = self.tensors
        if len(t) < high:
            t.extend([None] * (high - len(t)))
        self._payloads = payloads
        self._outcome.recent.begin(self.calls, self._definitions, numbers)
        reach, before = self._progress.reach, self._progress.done
        watched = self._memory.several  # a single stream need not report each command
        p = q = 0
        counted, count = 0, 0  # the position up to which interned calls are counted, and their number
        end, timing = len(a), self._outcome.timing
        # Some kernels save values for their backward only with gradients enabled, as they are on the master.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            while p < end:
                try:
                    calls = (
                        self.calls
                        if timing is None
                        else timing.timed(self._outcome, self.calls, self._definitions)
                    )
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
                        count += a[counted] >= FIRST
                        counted += self.calls[a[counted]][1]
                    self.fail(a, p, count, error)
                    p, q = p + self.calls[a[p]][1], q + self.calls[a[p]][2]
                    reach(before + p)
        reach(before + end)
        self._payloads = ()

    # -- failures ------------------------------------------------------------------------------

    def fail(
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
        t, number = self.tensors if within is None else within, a[p]
        if number < FIRST:
            self._failed_command(a, p, error)
            return
        program = self._programs.get(number)
        if program is not None:
            program.resume(self, a, p, position, error)
            return
        call = self._definitions[number]
        operands = a[p + 1 : p + 1 + call.operands]
        written = self._written(call, operands)
        poison = next((t[i] for i in operands if isinstance(t[i], Poison)), None)
        if poison is None:
            operator = call.operator.replace("::", ".")
            alone = not (call.results or call.mutated or written)
            poison = self._poison(position, operator, [t[i] for i in operands], error, alone, step)
        elif call.operator.startswith(between.NAMESPACE):
            with contextlib.suppress(Exception):  # the results are poisoned in any case
                between.take_part(call, poison.failure.poison, poison.failure.of)
        for i in written:
            self._poison_storage(t[i], poison, t)
            t[i] = poison
        for i in a[p + 1 + call.operands : p + self.calls[number][1]]:
            t[i] = poison

    def _poison(
        self,
        position: int,
        operator: str,
        operands: list[Any],
        error: BaseException,
        alone: bool = False,
        step: int = -1,
    ) -> Poison:
        outcome = self._outcome
        failure = OperationFailure(
            next(outcome.poisons),
            outcome.stream,
            outcome.batch,
            outcome.segment,
            position,
            operator,
            ", ".join(map(_shown, operands)),
            formatting.describe_error(error).partition(_TABLE)[0],
            formatting.traceback_of(error, error.__traceback__).partition(_TABLE)[0],
            alone,
            (error.node, error.number) if isinstance(error, Elsewhere) else None,
            step,
            outcome.recent.before(),
        )
        outcome.failures.append(failure)
        return Poison(failure)

    def _failed_command(self, a: list[int], p: int, error: BaseException) -> None:
        poison = self._poison(-1, "a command of the master", [], error)
        if a[p] in (PUT, KEEP, TAKE):
            self.tensors[a[p + 1]] = poison
        elif a[p] == SHARE:
            self._memory.hold(a[p + 3], a[p + 4], poison)
        elif a[p] in (FETCH, ITEM, ASK, CALL, STATE):
            self._outcome.spoilt(poison)

    def _written(self, call: Definition, operands: list[int]) -> list[int]:
        """Return the ids of the operands that a call writes to."""
        places = written_by(call.operator)
        if places is None:
            return operands
        written, at = [], 0
        for place, template in (*enumerate(call.args), *call.kwargs.items()):
            width = _tensors_in(template)
            if place in places:
                written += operands[at : at + width]
            at += width
        return written

    def _poison_storage(self, tensor: Any, poison: Poison, among: list[Any]) -> None:
        """Poison all tensors that share memory with `tensor`, in `among` and in all spaces."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()._cdata
        with self._memory.lock:  # no id may be released and reused meanwhile
            for tensors in (among, *self._memory.lists()):
                for i, other in enumerate(tensors):
                    if isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == storage:
                        tensors[i] = poison

    # -- calls ---------------------------------------------------------------------------------

    def _grow(self, operator: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        let_grow(tensor, self._all())
        return operator(tensor, *args, **kwargs)

    def _check(self, definition: Definition, t: list[Any], outputs: list[int]) -> bool:
        """Compare the results with the master's prediction; return whether any had its strides changed.

        A new tensor with other strides than predicted is copied to the predicted strides. A view gets them if
        it shows the same elements with them.

        Raises:
            Unexpected: shape, dtype, or the strides of a view differ.
        """
        restrided = False
        for i, expected in zip(outputs, definition.expected, strict=True):
            if expected is None:
                continue
            given = told(t[i])
            if given == expected:
                continue
            if is_layout_of(given, expected):
                t[i] = t[i].as_strided(expected.shape, expected.stride, expected.offset)
                restrided = True
                continue
            laid_out_alike = given._replace(stride=expected.stride, offset=expected.offset)
            if laid_out_alike != expected or definition.aliasing:
                raise Unexpected(
                    f"{definition.operator} returned {_shown(t[i])} with strides {given.stride}, "
                    f"offset {given.offset}, but the master predicted {in_words(expected)} with strides "
                    f"{expected.stride}, offset {expected.offset}"
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
        if definition.operator in GROWING:
            operator = partial(self._grow, operator)
        if not definition.differentiating:
            operator = torch.no_grad()(operator)
        run, scalars = compiled(definition, operator, self.device)
        width = 1 + definition.operands + len(definition.results) + len(definition.mutated)
        outputs = 1 + definition.operands

        def first(t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
            run(t, a, p, s, q)
            if self._check(definition, t, a[p + outputs : p + width]):
                self.calls[definition.number] = (again, width, scalars)
            else:
                self.calls[definition.number] = (run, width, scalars)
                self.plain[definition.number] = (definition, operator)

        def again(t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
            run(t, a, p, s, q)
            self._check(definition, t, a[p + outputs : p + width])

        self._definitions[definition.number] = definition
        self.calls[definition.number] = (first, width, scalars)

    def _forget_calls(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        for number in (*self._definitions, *self._programs):
            del self.calls[number]
        self._outcome.recent.clear()
        self._definitions.clear()
        self.plain.clear()
        self._programs.clear()

    def _program(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        program = Program(Recipe(*pickle.loads(self._payloads[a[p + 1]])), self)
        number = program.recipe.number
        self._programs[number] = program
        self.calls[number] = (program.run, program.width, 0)

    def _erase(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        number = a[p + 1]
        if self._programs.pop(number, None) is not None:  # FORGET may have removed it
            del self.calls[number]

    def _wait(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        node, space, stream, low, high = a[p + 1 : p + 6]
        if node in (EVERY_NODE, self._memory.node):
            self._memory.wait(space, stream, low | high << 32)

    def _release(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._memory.release(t, self._space, a[p + 1], a[p + 2])

    def _mark(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = Mark(bool(a[p + 2]))

    def _expect(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._memory.expect(a[p + 1])

    def _put(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = self._payloads[a[p + 2]].to(self.device)

    def _share(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self.hold(a[p + 3], a[p + 4], self.tensors_of(a[p + 1])[a[p + 2]])

    def tensors_of(self, space: int) -> list[Any]:
        """Return the tensors of a space on this node."""
        return self._memory.tensors(space)

    def hold(self, space: int, id: int, value: Any) -> None:
        """Store a tensor under an id of a space."""
        self._memory.hold(space, id, value)

    def _fetch(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        value = t[a[p + 1]]
        if isinstance(value, Poison):
            self._outcome.spoilt(value)
        else:
            # cloned: the next batch may write to the tensor while the reply is sent
            self._outcome.values.append(("tensor", value.resolve_conj().resolve_neg().detach().cpu().clone()))

    def _item(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        value = t[a[p + 1]]
        if isinstance(value, Poison):
            self._outcome.spoilt(value)
        else:
            self._outcome.values.append(("number", value.item()))

    def _seed(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        accelerators.seed(a[p + 1] | a[p + 2] << 32)

    def _state(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        state = self._payloads[a[p + 1]]
        if state is None:
            self._outcome.values.append(("tensor", accelerators.random_state()))
        else:
            accelerators.set_random_state(state)

    def _ask(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        operator, args, kwargs, ids, scalars = pickle.loads(self._payloads[a[p + 1]])
        operands = [t[id] for id in ids]
        poison = next((each for each in operands if isinstance(each, Poison)), None)
        if poison is not None:
            self._outcome.spoilt(poison)
            return

        def device(template: Template) -> torch.device:
            if len(template) > 1:
                return accelerators.device(template[1])
            return operands[0].device if operands else self.device

        given, keyed = filled(args, kwargs, operands, scalars, device)
        try:
            self._asked, answer = run_asked(operator, given, keyed, self._all)
        except BaseException as error:
            poison = self._poison(-1, operator, operands, error)
            self._outcome.spoilt(poison)
            return
        self._outcome.values.append(("asked", answer))

    def _all(self) -> list[Any]:
        """Return all tensors of the node."""
        with self._memory.lock:
            return [each for tensors in self._memory.lists() for each in tensors]

    def _call(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        poisoned: list[Poison] = []

        def tensor(space: int, id: int) -> Any:
            found = self._memory.tensors(space)[id]
            if isinstance(found, Poison):
                poisoned.append(found)
            return found

        try:
            given = answer(self._payloads[a[p + 1]], tensor, poisoned)
        except BaseException as error:
            poison = poisoned[0] if poisoned else self._poison(-1, "call", [], error)
            self._outcome.spoilt(poison)
            return
        if given.tensors:
            self._called[a[p + 2]] = given.tensors
        self._outcome.values.append(("called", (given.value, given.told)))

    def _take(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = self._called[a[p + 2]][a[p + 3]]

    def _drop(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        self._called.pop(a[p + 1], None)

    def _keep(self, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        t[a[p + 1]] = self._asked[a[p + 2]]


def _free(t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
    t[a[p + 1]] = None


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return in_words(told(value))
    return "a poisoned tensor" if isinstance(value, Poison) else repr(value)


def _tensors_in(template: Template) -> int:
    if template[0] == "list":
        return sum(_tensors_in(each) for each in template[1])
    return int(template[0] == "tensor")
