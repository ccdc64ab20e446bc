"""The identity of operations issued in callbacks: the same on every rank, whatever the order of events."""

from __future__ import annotations

import threading

from shoal.future import CallbackScope, Future, callback_scope, collect_all, derive_key


def _keys_of(future: Future[int], count: int) -> Future[list[int]]:
    def callback(_: Future[int]) -> list[int]:
        scope = callback_scope.get()
        assert scope is not None
        return [scope.next_key() for _ in range(count)]

    return future.then(callback)


def test_there_is_no_scope_outside_callbacks() -> None:
    assert callback_scope.get() is None


def test_keys_follow_from_the_future_the_callback_and_the_operation_alone() -> None:
    runs = []
    for order in ([0, 1], [1, 0]):
        future: Future[int] = Future(key=11)
        turn = [threading.Event(), threading.Event()]

        def callback(index: int, order: list[int] = order, turn: list[threading.Event] = turn) -> list[int]:
            if order[1] == index:
                turn[order[0]].wait(30)
            scope = callback_scope.get()
            assert scope is not None
            keys = [scope.next_key(), scope.next_key()]
            turn[index].set()
            return keys

        children = [future.then(lambda _, index=index: callback(index)) for index in range(2)]
        future.set_result(0)
        runs.append([child.wait(30) for child in children])
    assert runs[0] == runs[1]
    keys = [key for callback in runs[0] for key in callback]
    assert len(set(keys)) == 4
    assert all(0 < key < 2**63 for key in keys)


def test_keys_of_different_purposes_differ() -> None:
    assert derive_key(b"then", 1, 2) != derive_key(b"operation", 1, 2)
    scopes = CallbackScope(1, 2), CallbackScope(1, 3), CallbackScope(2, 2)
    assert len({scope.next_key() for scope in scopes}) == 3


def test_futures_without_a_key_give_no_scope() -> None:
    future: Future[int] = Future()
    child = future.then(lambda _: callback_scope.get())
    future.set_result(1)
    assert child.wait(10) is None
    assert child.key is None


def test_the_scope_ends_with_the_callback() -> None:
    """Pool threads are used again."""
    keyed: Future[int] = Future(key=1)
    keyed.set_result(0)
    assert keyed.then(lambda _: callback_scope.get()).wait(10) is not None
    plain: Future[int] = Future()
    plain.set_result(0)
    for _ in range(10):
        assert plain.then(lambda _: callback_scope.get()).wait(10) is None


def test_the_future_of_a_callback_has_a_key_of_its_own() -> None:
    def children() -> list[int | None]:
        future: Future[int] = Future(key=5)
        future.add_done_callback(lambda _: None)
        first = future.then(lambda _: None)
        second = first.then(lambda _: None)
        return [future.key, first.key, second.key, future.then(lambda _: None).key]

    keys = children()
    assert keys == children()
    assert len(set(keys)) == 4


def test_a_collection_has_a_key_if_all_its_futures_have() -> None:
    def collected(*keys: int | None) -> int | None:
        return collect_all([Future[int](key=key) for key in keys]).key

    assert collected(1, 2) == collected(1, 2)
    assert collected(1, 2) != collected(2, 1)
    assert collected(1, None) is None


def test_scopes_nest_when_a_callback_waits_for_another() -> None:
    outer: Future[int] = Future(key=1)
    inner: Future[int] = Future(key=2)

    def callback(_: Future[int]) -> tuple[list[int], list[int]]:
        scope = callback_scope.get()
        assert scope is not None
        first = scope.next_key()
        inner.set_result(0)
        nested = _keys_of(inner, 2).wait(30)
        assert callback_scope.get() is scope
        return [first, scope.next_key()], nested

    child = outer.then(callback)
    outer.set_result(0)
    own, nested = child.wait(30)
    expected: Future[int] = Future(key=1)
    alone = _keys_of(expected, 2)
    expected.set_result(0)
    assert own == alone.wait(10)
    assert not set(own) & set(nested)
