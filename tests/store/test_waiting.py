"""Who waits for what, and whom to wake when."""

from __future__ import annotations

from shoal.net.server import Timers
from shoal.store.tcp.server import WaitIndex


def test_an_item_is_ready_when_its_last_key_appears() -> None:
    waiting: WaitIndex[str] = WaitIndex()
    waiting.add("one", ["a"])
    waiting.add("two", ["a", "b", "a"])
    assert waiting.appeared("c") == []
    assert waiting.appeared("a") == ["one"]
    assert waiting.appeared("a") == []
    assert waiting.appeared("b") == ["two"]
    assert len(waiting) == 0


def test_items_are_woken_in_the_order_in_which_they_came() -> None:
    waiting: WaitIndex[int] = WaitIndex()
    for item in (3, 1, 2):
        waiting.add(item, ["key"])
    assert waiting.appeared("key") == [3, 1, 2]


def test_a_removed_item_is_forgotten() -> None:
    waiting: WaitIndex[str] = WaitIndex()
    waiting.add("one", ["a", "b"])
    waiting.add("two", ["b"])
    waiting.remove("one")
    waiting.remove("never there")
    assert waiting.appeared("a") == []
    assert waiting.appeared("b") == ["two"]


def test_alarms_ring_in_order_and_once() -> None:
    alarms: Timers[str] = Timers()
    for item, at in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        alarms.set(item, at)
    assert alarms.next() == 1.0
    assert alarms.due(2.0) == ["early", "middle"]
    assert alarms.due(2.0) == []
    assert alarms.next() == 3.0


def test_a_cancelled_or_moved_alarm_does_not_ring() -> None:
    alarms: Timers[str] = Timers()
    alarms.set("cancelled", 1.0)
    alarms.set("moved", 1.0)
    alarms.cancel("cancelled")
    alarms.cancel("never there")
    alarms.set("moved", 5.0)
    assert alarms.due(4.0) == []
    assert alarms.next() == 5.0


def test_cancelled_alarms_do_not_pile_up() -> None:
    alarms: Timers[int] = Timers()
    for item in range(10_000):
        alarms.set(item, 1e9)
        alarms.cancel(item)
    assert len(alarms._heap) < 1000
    assert alarms.next() is None
