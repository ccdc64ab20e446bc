"""Linearizability checks of stores: whether the calls of several clients have a consistent order.

    linearize.play(store)                       # random operations, and the check of what they returned

    history = []
    client = linearize.Recorder(store, "a", history)
    client.add("key", 1)                        # as on the store, from several threads
    linearize.check(history)

A history passes if each operation can be assigned a moment between its call and its return such that the
operations, executed one by one in this order, return the recorded results. The search is that of Wing and
Gong (1993), per key and memoized, in the order of time (Lowe, 2017): it keeps all possible states of the key,
so it also finds the first return that cannot be explained.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from ..errors import StoreError, StoreTimeout
from ..store import Store
from ..store.requests import Append, Call, CompareSet, KeyTable, Together

T = TypeVar("T")

#: seconds for which ``play`` waits for a missing key
MISSING_KEY_TIMEOUT_S = 0.01
#: relative frequencies of the kinds of operations
_KINDS = {"set": 3, "get": 6, "add": 6, "compare_set": 5, "append": 3, "delete": 2, "check": 2, "together": 3}
#: maximum number of lines, and of bytes of a value, in an error message
_LINES, _BYTES = 12, 60


class RefusedResult(NamedTuple):
    """The result of an operation that raised ``StoreError`` and so changed nothing."""

    why: str


class RecordedCall(NamedTuple):
    """One call of a :class:`Recorder` method, with its result.

    Attributes:
        called, returned: times on one clock. ``returned=None`` means no reply: the operation may be executed
            at any time after the call, or never.
    """

    client: str
    name: str
    key: str
    arguments: tuple[Any, ...]
    called: int
    returned: int | None
    result: object = None


class Recorder:
    """A client of a store that appends its calls to ``history``, which threads may share.

    A ``StoreTimeout`` is recorded as a missing reply, a ``StoreError`` of ``add`` and ``append`` as
    :class:`RefusedResult`; both are raised.
    """

    def __init__(self, store: Store, client: str, history: list[RecordedCall]) -> None:
        self._store, self._client, self._history = store, client, history

    def set(self, key: str, value: bytes) -> None:
        self._note("set", key, (value,), lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        return self._note("get", key, (), lambda: self._store.get(key, timeout))

    def add(self, key: str, amount: int) -> int:
        return self._note("add", key, (amount,), lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        call = partial(self._store.compare_set, key, expected, desired)
        return self._note("compare_set", key, (expected, desired), call)

    def append(self, key: str, value: bytes) -> None:
        self._note("append", key, (value,), lambda: self._store.append(key, value))

    def delete(self, key: str) -> bool:
        return self._note("delete", key, (), lambda: self._store.delete(key))

    def check(self, key: str) -> bool:
        """Whether ``key`` exists."""
        return self._note("check", key, (), lambda: self._store.check([key]))

    def together(self, key: str, calls: Sequence[Call]) -> list[Any]:
        """``store.together(calls)``; all calls must change ``key``, and the store must accept all."""
        assert all(call.key == key for call in calls)
        return self._note("together", key, (tuple(calls),), lambda: self._store.together(calls))

    def _note(self, name: str, key: str, arguments: tuple[Any, ...], call: Callable[[], T]) -> T:
        called, returned = time.monotonic_ns(), None
        result: object = None
        try:
            result = value = call()
            returned = time.monotonic_ns()
            return value
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
    """Call random methods on a few keys in ``clients`` threads, and check the results.

    Each client has a clone of ``store``. ``seed`` determines the calls, but not their timing.

    Args:
        together: also call :meth:`~shoal.store.Store.together`, which is not atomic in every store.

    Returns:
        The history.

    Raises:
        AssertionError: the history is not linearizable, see :func:`check`.
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
        value = b"%d" % (1000 * (step + 1) + number)  # unique, and a valid counter
        (kind,) = chance.choices([*kinds], [*kinds.values()])
        try:
            if kind == "set":
                client.set(key, value)
            elif kind == "get":
                seen[key] = client.get(key, chance.choice([0.0, MISSING_KEY_TIMEOUT_S]))
            elif kind == "add":
                client.add(key, 1 + number % 2)  # some clients add the same amount
            elif kind == "compare_set":
                seen[key] = client.compare_set(key, seen[key], value)
            elif kind == "append":
                client.append(key, b"," + value)
            elif kind == "delete":
                client.delete(key)
            elif kind == "together":
                calls: list[Call] = [
                    CompareSet(key, seen[key], value), Append(key, b",1"), Append(key, b",2"),
                ]  # fmt: skip
                seen[key] = client.together(key, calls[chance.choice([0, 1]) :])[0] or seen[key]
            else:
                client.check(key)
        except StoreTimeout:
            pass  # recorded as unanswered
        except StoreError:
            if kind != "add":
                raise
            # Refused because the key held no counter; otherwise the check fails.


#: (value of the key or None, pending operations that have taken effect)
_State = tuple[bytes | None, frozenset[int]]


def check(history: Iterable[RecordedCall]) -> None:
    """Check that the operations on each key, none of which exists at first, are linearizable.

    The time grows quickly with the number of concurrent operations per key and of unanswered operations.

    Raises:
        AssertionError: they are not. The message shows the first operation whose result cannot be explained
            and the operations around it.
    """
    for key, some in groupby(sorted(history, key=lambda each: each.key), lambda each: each.key):
        _check_key(key, sorted(some, key=lambda each: each.called))


def _check_key(key: str, operations: list[RecordedCall]) -> None:
    events = []
    for number, each in enumerate(operations):
        if each.returned is not None:
            events.append((each.returned, 1, number))
        elif each.name in ("get", "check"):
            continue  # without a result it constrains nothing
        events.append((each.called, 0, number))  # calls sort before returns of the same time: they overlap
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
    """The states in which operation `number`, and possibly others before it, have taken effect."""
    unanswered = {each for each in under_way if operations[each].returned is None}
    kept: dict[_State, list[frozenset[int]]] = {}
    reached: list[_State] = []
    ahead = deque(sorted(states, key=lambda state: len(state[1])))
    while ahead:
        held, done = ahead.popleft()
        # A state with the same value and fewer unanswered operations used subsumes this one.
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
    """Execute an operation on a key with value `held`; return whether it matches, and the new value."""
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
        f"key {key!r}: no order of its {len(before)} first operations explains the result of {last.client}, "
        f"{_called(last)}.",
        "After the previous return the key could hold " + " or ".join(may_hold[:8]) + ".",
        "Microseconds of call and return; overlapping operations last:",
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
