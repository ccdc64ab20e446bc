"""Checks that what several clients saw of a store has an order: that the store is linearizable.

    linearize.play(store)                       # random operations, and the check of what they returned

    history = []
    client = linearize.Recorder(store, "a", history)
    client.add("key", 1)                        # as on the store, from several threads
    linearize.check(history)

A history passes if every operation can be given one moment, between its call and its return, so that the
operations, done one by one in the order of these moments, return what they returned.  The search is that of
Wing and Gong (1993), key by key and with a memo, and goes through the history in time (Lowe, 2017): at every
return it knows all that the store may hold, so the first return without an explanation is known as well.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

from ..errors import StoreError, StoreTimeout
from ..store import Store
from ..store.operations import KeyTable
from ..store.requests import Append, Call, CompareSet, Together

#: seconds for which ``play`` waits for a key that is missing
_PATIENCE = 0.01
#: how often it chooses each kind of operation
_KINDS = {"set": 3, "get": 6, "add": 6, "compare_set": 5, "append": 3, "delete": 2, "check": 2, "together": 3}
#: the lines and bytes of a value that an error shows at most
_LINES, _BYTES = 12, 60


class RefusedResult(NamedTuple):
    """The result of an operation that raised ``StoreError``, and so changed nothing."""

    why: str


class RecordedCall(NamedTuple):
    """One call of a method of :class:`Recorder` and what came of it.

    Attributes:
        called, returned: moments on one clock; ``returned=None``: no answer came.  The operation
            may be done at any moment after the call, or never.
    """

    client: str
    name: str
    key: str
    arguments: tuple[Any, ...]
    called: int
    returned: int | None
    result: object = None


class Recorder:
    """One client of a store, whose calls are noted in ``history``.

    A ``StoreTimeout`` is noted as a missing answer, a ``StoreError`` of ``add`` and ``append`` as
    :class:`RefusedResult`; both are raised.  Clients in several threads may share a history.
    """

    def __init__(self, store: Store, client: str, history: list[RecordedCall]) -> None:
        self._store, self._client, self._history = store, client, history

    def set(self, key: str, value: bytes) -> None:
        self._note("set", key, (value,), lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        result: bytes = self._note("get", key, (), lambda: self._store.get(key, timeout))
        return result

    def add(self, key: str, amount: int) -> int:
        result: int = self._note("add", key, (amount,), lambda: self._store.add(key, amount))
        return result

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        arguments = (expected, desired)
        result: bytes = self._note(
            "compare_set", key, arguments, lambda: self._store.compare_set(key, expected, desired)
        )
        return result

    def append(self, key: str, value: bytes) -> None:
        self._note("append", key, (value,), lambda: self._store.append(key, value))

    def delete(self, key: str) -> bool:
        result: bool = self._note("delete", key, (), lambda: self._store.delete(key))
        return result

    def check(self, key: str) -> bool:
        """Whether ``key`` exists."""
        result: bool = self._note("check", key, (), lambda: self._store.check([key]))
        return result

    def together(self, key: str, calls: Sequence[Call]) -> list[Any]:
        """``store.together(calls)``, all of which change ``key``, and none of which the store can refuse."""
        assert all(call.key == key for call in calls)
        result: list[Any] = self._note("together", key, (tuple(calls),), lambda: self._store.together(calls))
        return result

    def _note(self, name: str, key: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        called, returned = time.monotonic_ns(), None
        result: object = None
        try:
            result = call()
            returned = time.monotonic_ns()
            return result
        except StoreError as error:
            if not isinstance(error, StoreTimeout) and name in ("add", "append"):
                returned, result = time.monotonic_ns(), RefusedResult(str(error))
            raise
        finally:
            self._history.append(RecordedCall(self._client, name, key, arguments, called, returned, result))


def play(
    store: Store,
    *,
    clients: int = 5,
    operations: int = 60,
    keys: int = 3,
    seed: int = 0,
    together: bool = True,
) -> list[RecordedCall]:
    """Have ``clients`` threads call random methods on a few keys at once, and check what they returned.

    Each client has a clone of ``store``.  What is called follows from ``seed``, when it is called does not.

    Args:
        together: also call :meth:`~shoal.store.Store.together`, which not every store does in one step.

    Returns:
        the history, which passed.

    Raises:
        AssertionError: it has no order, see :func:`check`.
        StoreError: the store cannot be reached.
    """
    names = [f"linearize/{number}" for number in range(keys)]
    for name in names:
        store.delete(name)
    history: list[RecordedCall] = []
    ready = threading.Barrier(clients)
    kinds = {kind: often for kind, often in _KINDS.items() if together or kind != "together"}

    def work(number: int, own: Store) -> None:
        client = Recorder(own, f"client {number}", history)
        ready.wait()
        _work(client, names, kinds, operations, number, random.Random(f"{seed}/{number}"))

    with ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
        clones = [stack.enter_context(store.clone()) for _ in range(clients)]
        for each in [pool.submit(work, number, own) for number, own in enumerate(clones)]:
            each.result()
    check(history)
    return history


def _work(
    client: Recorder,
    keys: list[str],
    kinds: Mapping[str, int],
    operations: int,
    number: int,
    chance: random.Random,
) -> None:
    seen = dict.fromkeys(keys, b"")
    for step in range(operations):
        key = chance.choice(keys)
        value = b"%d" % (1000 * (step + 1) + number)  # no two are equal, and all are counters
        (kind,) = chance.choices([*kinds], [*kinds.values()])
        try:
            if kind == "set":
                client.set(key, value)
            elif kind == "get":
                seen[key] = client.get(key, chance.choice([0.0, _PATIENCE]))
            elif kind == "add":
                client.add(key, 1 + number % 2)  # some add the same
            elif kind == "compare_set":
                seen[key] = client.compare_set(key, seen[key], value)
            elif kind == "append":
                client.append(key, b"," + value)
            elif kind == "delete":
                client.delete(key)
            elif kind == "together":
                calls: list[Call] = [
                    CompareSet(key, seen[key], value),
                    Append(key, b",1"),
                    Append(key, b",2"),
                ]
                seen[key] = client.together(key, calls[chance.choice([0, 1]) :])[0] or seen[key]
            else:
                client.check(key)
        except StoreTimeout:
            pass  # unanswered
        except StoreError:
            if kind != "add":
                raise
            # Refused: the key held no counter, or the check will say so.


#: what a key may hold (None: it does not exist), and those operations under way that were done
_State = tuple[bytes | None, frozenset[int]]


def check(history: Iterable[RecordedCall]) -> None:
    """Check that the operations on each key have an order; before them no key exists.

    The time grows quickly with the number of operations on one key that are under way at once, and of
    those that were never answered.

    Raises:
        AssertionError: they have none.  It names the first operation whose result cannot be explained,
            and those around it.
    """
    for key, some in groupby(sorted(history, key=lambda each: each.key), lambda each: each.key):
        _check_key(key, sorted(some, key=lambda each: each.called))


def _check_key(key: str, operations: list[RecordedCall]) -> None:
    events = []
    for number, each in enumerate(operations):
        if each.returned is not None:
            events.append((each.returned, 1, number))
        elif each.name in ("get", "check"):
            continue  # it says nothing
        events.append((each.called, 0, number))  # at the same moment: calls first, so that both overlap
    states: set[_State] = {(None, frozenset())}
    under_way: set[int] = set()
    for _, returns, number in sorted(events):
        if not returns:
            under_way.add(number)
            continue
        reached = _after(states, number, under_way, operations)
        if not reached:
            raise AssertionError(_explained(key, operations, number, states))
        under_way.remove(number)
        states = {(held, done - {number}) for held, done in reached}


def _after(
    states: set[_State], number: int, under_way: set[int], operations: list[RecordedCall]
) -> list[_State]:
    """The states in which operation ``number`` is done, with those that may have been done before it."""
    unanswered = {each for each in under_way if operations[each].returned is None}
    kept: dict[_State, list[frozenset[int]]] = {}
    reached: list[_State] = []
    ahead = deque(sorted(states, key=lambda state: len(state[1])))
    while ahead:
        held, done = ahead.popleft()
        # An equal state that has used up fewer of the unanswered operations leads wherever this one does.
        alike = kept.setdefault((held, done - unanswered), [])
        if any(other <= done for other in alike):
            continue
        alike.append(done)
        if number in done:
            reached.append((held, done))
            continue
        for other in under_way - done:
            fits, after = _alone(held, operations[other])
            if fits:
                ahead.append((after, done | {other}))
    return reached


def _alone(held: bytes | None, operation: RecordedCall) -> tuple[bool, bytes | None]:
    """Do one operation on a key that holds ``held``: whether it returns the result, and what is held then."""
    table = KeyTable()
    if held is not None:
        table.values[operation.key] = held
    try:
        if operation.name == "get":
            result: object = held
        elif operation.name == "check":
            result = held is not None
        elif operation.name == "together":
            result = Together(list(*operation.arguments)).apply(table).results
        else:
            result = getattr(table, operation.name)(operation.key, *operation.arguments)
    except StoreError:
        return operation.returned is None or isinstance(operation.result, RefusedResult), held
    return operation.returned is None or result == operation.result, table.values.get(operation.key)


def _explained(key: str, operations: list[RecordedCall], number: int, states: set[_State]) -> str:
    last = operations[number]
    assert last.returned is not None
    before = [each for each in operations if each.called <= last.returned]
    start = before[0].called
    before.sort(key=lambda each: (each is last, each.returned is None, each.returned or each.called))
    done = [each for each in before if each.returned is not None and each.returned < last.called]
    around = [each for each in before if each not in done]
    shown = [*done[len(done) - max(0, _LINES - len(around)) :], *around] if len(around) < _LINES else around
    may_hold = sorted({_short(held) for held, _ in states})
    lines = [
        f"key {key!r}: no order of its {len(before)} first operations explains what {last.client} got from "
        f"{_called(last)}.",
        "When the operation before it had returned, the key could hold " + " or ".join(may_hold[:8]) + ".",
        "Microseconds of call and return, those that overlap last:",
    ]
    if len(shown) < len(before):
        lines.append(f"  ... {len(before) - len(shown)} more")
    for each in shown:
        end = "never" if each.returned is None else f"{(each.returned - start) / 1000:.1f}"
        lines.append(f"  {(each.called - start) / 1000:9.1f} {end:>9}  {each.client}: {_called(each)}")
    return "\n".join(lines)


def _called(operation: RecordedCall) -> str:
    arguments = ", ".join(map(_short, operation.arguments))
    call = f"{operation.name}({arguments})"
    if operation.returned is None:
        return f"{call}, unanswered"
    if isinstance(operation.result, RefusedResult):
        return f"{call}, refused: {operation.result.why}"
    return f"{call} -> {_short(operation.result)}"


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bytes) and len(value) > _BYTES:
        return f"...{value[-_BYTES:]!r} ({len(value)} bytes)"
    return repr(value)
