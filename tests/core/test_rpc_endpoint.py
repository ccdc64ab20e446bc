"""The native endpoint of RPC: letters between posts, which share nothing but a socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal._core import Call, CallEnd, Packet, Part, RpcEndpoint
from shoal.testing.leaks import no_leaks
from tests.support.waiting import until

#: Seconds after which what should have happened long ago counts as lost.
BACKSTOP = 30.0
SIZES = (0, 1, 100, 16 * 1024, 16 * 1024 + 1, 256 * 1024, 256 * 1024 + 1, 3_000_000)


#: mailboxes that are open beside that of the calls
ORDERED = (3, 4, 5, 9)


def spot(buffer: bytearray | Part) -> tuple[int, int]:
    size = len(buffer)
    return (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if size else 0, size)


def connected(kind: str) -> tuple[int, int]:
    if kind == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = socket.create_connection(listener.getsockname())
            ends = (first, listener.accept()[0])
    return ends[0].detach(), ends[1].detach()


class Two:
    """Two posts and what each calls the other; the ticket of a loss is 1."""

    def __init__(self, kind: str, budget: int = 1 << 30, heartbeat: float = BACKSTOP, pid: int = 0) -> None:
        self.caller = RpcEndpoint.make(budget, heartbeat)
        self.callee = RpcEndpoint.make(budget, BACKSTOP)  # only the caller listens for silence
        there, here = connected(kind)
        self.to = self.caller.attach(there, pid, 1)
        self.back = self.callee.attach(here, pid, 1)
        for mailbox in ORDERED:
            self.callee.open(mailbox)
        self._threads: list[threading.Thread] = []

    def call(self, head: bytes = b"", timeout: float | None = BACKSTOP, mailbox: int = 0) -> Call:
        return self.caller.request(self.to, mailbox, head, [], None, timeout)

    def serve(self, answer: Callable[[Packet], Any] | None = None) -> None:
        """Answers each call with what it says, backwards."""

        def handle() -> None:
            while (letters := self.callee.take(0, None, 1)) is not None:
                for letter in letters:
                    if answer is not None:
                        answer(letter)
                    parts = letter.parts
                    self.callee.reply(letter, letter.head[::-1], [spot(part) for part in parts], parts)

        self._threads.append(threading.Thread(target=handle, daemon=True))
        self._threads[-1].start()

    def taken(self, mailbox: int = 0) -> Packet:
        letters = self.callee.take(mailbox, BACKSTOP, 1)
        assert letters, "no letter came"
        return letters[0]

    def close(self) -> None:
        self.caller.close(BACKSTOP)
        self.callee.close(BACKSTOP)
        for thread in self._threads:
            thread.join(BACKSTOP)


@pytest.fixture(params=["unix", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with no_leaks():
        both = Two(request.param)
        yield both
        both.close()
        del both


def open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            yield os.readlink(f"/proc/self/fd/{name}")


def outcome(call: Call) -> tuple[CallEnd, str] | None:
    assert call.wait(BACKSTOP), "the call hangs"
    failure = call.error()
    return failure and (failure.end, failure.text)


def test_heads_and_parts_of_all_sizes_come_back_as_they_were(two: Two) -> None:
    two.serve()
    buffers = [bytearray(os.urandom(size)) for size in SIZES]
    for head in (b"", b"small", os.urandom(1_000_000)):
        call = two.caller.request(two.to, 0, head, [spot(b) for b in buffers], buffers, BACKSTOP, 7)
        assert outcome(call) is None
        reply = call.reply()
        assert reply.head == head[::-1]
        assert not reply.failed
        assert [bytes(part) for part in reply.parts] == [bytes(b) for b in buffers]
        assert all(spot(part)[0] % 16 == 0 for part in reply.parts)
        assert not memoryview(reply.parts[-1]).readonly
        with pytest.raises(RuntimeError, match="taken already"):
            call.reply()


def test_what_a_letter_says_arrives_and_a_post_has_no_reply(two: Two) -> None:
    call = two.caller.request(two.to, 0, b"head", [], None, BACKSTOP, 0xABCD)
    letter = two.taken()
    assert (letter.peer, letter.call, letter.mailbox, letter.flags) == (two.back, call.number, 0, 0xABCD)
    left = letter.remaining()
    assert left is not None
    assert 0 < left <= BACKSTOP
    assert two.callee.reply(letter, b"no", [], None, failed=True, flags=3)
    assert outcome(call) is None
    reply = call.reply()
    assert (reply.failed, reply.flags, reply.head) == (True, 3, b"no")
    assert not two.callee.reply(letter, b"again", [], None)
    assert two.caller.post(two.to, 5, b"one way", [], None, BACKSTOP)
    letter = two.taken(5)
    assert (letter.call, letter.head, letter.remaining()) == (0, b"one way", None)
    assert not two.callee.reply(letter, b"", [], None)


def test_letters_of_one_mailbox_keep_their_order_whatever_their_size(two: Two) -> None:
    buffers = [bytearray(size) for size in SIZES * 4]
    for index, buffer in enumerate(buffers):
        two.caller.post(two.to, 9, b"%d" % index, [spot(buffer)], buffer, BACKSTOP)
    assert [two.taken(9).head for _ in buffers] == [b"%d" % index for index in range(len(buffers))]


def test_an_overdue_call_says_what_its_callee_knows_of_it(two: Two) -> None:
    for timeout in (0.2, 0.5, 2.0, 5.0):
        running = two.call(timeout=timeout)
        letters = two.callee.take(0, timeout, 1)
        if not letters:  # it was late before it was taken: this machine is busy
            continue
        letter = letters[0]
        letter.describe("module.fn")
        queued = [two.call(timeout=timeout) for _ in range(2)]
        ends = [outcome(call) or (None, "") for call in (running, *queued)]
        assert [end for end, _ in ends] == [CallEnd.TIMEOUT] * 3
        until(letter.cancelled)
        until(lambda: two.callee.waiting(0) == 0)
        # Nor has the machine stood still between the call and its description.
        if "module.fn" in ends[0][1] and all(text != "its endpoint does not answer" for _, text in ends):
            break
    assert re.fullmatch(r"running for [\d.]+ s in module.fn", ends[0][1])
    assert ends[1][1] == "queued behind 0"
    assert ends[2][1] in ("queued behind 0", "queued behind 1")
    assert two.callee.take(0, 0.0, 10) == []
    assert not two.callee.reply(letter, b"", [], None)


def test_a_cancelled_call_ends_at_once_and_its_handler_hears_of_it(two: Two) -> None:
    running, queued = two.call(), two.call()
    letter = two.taken()
    assert not letter.cancelled()
    assert not letter.announce(77)
    assert running.cancel()
    assert not running.cancel()
    assert queued.cancel()
    assert outcome(running) == outcome(queued) == (CallEnd.CANCELLED, "cancelled")
    assert two.callee.completions(BACKSTOP) == [77]
    assert letter.cancelled()
    assert letter.announce(78)
    until(lambda: two.callee.waiting(0) == 0)
    assert not two.callee.reply(letter, b"", [], None)
    two.serve()
    assert outcome(two.call()) is None


def test_tickets_tell_of_calls_of_the_neglected_inbox_and_of_a_loss(two: Two) -> None:
    call = two.call()
    assert not call.announce(5)
    two.callee.watch(6, 0.002)
    assert set(two.callee.completions(BACKSTOP) or []) == {6}
    two.callee.reply(two.taken(), b"", [], None)
    assert two.caller.completions(BACKSTOP) == [5]
    assert call.announce(7)
    two.callee.close(BACKSTOP)
    assert two.caller.completions(BACKSTOP) == [1]
    assert two.caller.lost(two.to) == "it has left"
    assert outcome(two.call()) == (CallEnd.LOST, "it has left")
    assert not two.caller.post(two.to, 0, b"", [], None, 1.0)


def test_letters_that_wait_are_neglected_only_if_few_are_taken_meanwhile(two: Two) -> None:
    """More threads would only take turns with one that serves short calls one after another."""
    stood_still, before = False, time.monotonic()

    def taking_goes_on(most: float = 0.03) -> bool:
        """Whether this thread has run all the time: letters are neglected on a machine that stands still."""
        nonlocal stood_still, before
        now = time.monotonic()
        stood_still |= now - before > most
        before = now
        return not stood_still

    two.callee.watch(6, 0.15)
    for i in range(20_000):
        assert two.caller.post(two.to, 0, b"", [], None, BACKSTOP)
        if i % 100 == 0:
            two.callee.take(0, 0.0, 20)
            taking_goes_on(0.008)
    end = time.monotonic() + 0.4
    while time.monotonic() < end and two.callee.waiting(0) and taking_goes_on():
        due = two.callee.completions(0.0)
        assert due == [] or not taking_goes_on()
        two.callee.take(0, 0.0, 100)
        time.sleep(0.004)
    assert two.callee.waiting(0), "no letter waited to the end"
    assert set(two.callee.completions(BACKSTOP) or []) == {6}


def test_a_dropped_peer_fails_its_calls_and_keeps_what_it_sent(two: Two) -> None:
    two.caller.post(two.to, 3, b"before", [], None, BACKSTOP)
    until(lambda: two.callee.waiting(3) == 1)
    call = two.call()
    two.caller.drop(two.to, "no more of this")
    assert outcome(call) == (CallEnd.LOST, "no more of this")
    assert two.callee.completions(BACKSTOP) == [1]
    assert two.taken(3).head == b"before"


def test_a_flooding_caller_waits_and_learns_that_nothing_is_taken(two: Two) -> None:
    head = bytes(200_000)
    calls = []
    while two.caller.stats()["queued"] <= (64 << 20) - len(head):
        calls.append(two.call(head))
    end, text = outcome(two.call(head, timeout=0.2)) or (None, "")
    assert end is CallEnd.TIMEOUT
    assert re.fullmatch(r"takes nothing for [\d.]+ s, 3\d\d packets queued", text)
    assert two.callee.stats()["letters"] * len(head) <= 8 << 20
    assert two.caller.stats()["queued"] <= 65 << 20
    two.serve()
    assert outcome(two.call()) is None
    assert all(outcome(call) is None for call in calls)


def test_large_parts_come_within_the_budget(two: Two) -> None:
    small = Two("unix", budget=2_000_000)
    buffers = [bytearray(b"%d" % index * 900_000) for index in range(8)]
    calls = [small.caller.request(small.to, 0, b"", [spot(b), spot(b)], b, BACKSTOP) for b in buffers]
    until(lambda: small.callee.waiting(0) >= 1)
    assert small.callee.stats()["granted"] <= 2_000_000
    small.serve()
    for call, buffer in zip(calls, buffers, strict=True):
        assert outcome(call) is None
        assert [bytes(part) for part in call.reply().parts] == [bytes(buffer)] * 2
    until(lambda: small.callee.stats()["granted"] == 0)
    small.close()


def test_what_is_sent_is_let_go_of_when_the_call_has_ended(two: Two) -> None:
    class Kept:
        gone = threading.Event()

        def __del__(self) -> None:
            self.gone.set()

    buffer = bytearray(5_000_000)
    for end in ("reply", "cancel"):
        Kept.gone.clear()
        call = two.caller.request(two.to, 0, b"", [spot(buffer)], Kept(), BACKSTOP)
        if end == "reply":
            two.callee.reply(two.taken(), b"", [], None)
            assert outcome(call) is None
        else:
            assert call.cancel()
        until(lambda: two.caller.completions(0.0) == [] and Kept.gone.is_set())


def test_a_released_mailbox_refuses_calls_and_wakes_its_reader(two: Two) -> None:
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.append(two.callee.take(4, BACKSTOP, 1)))
    reader.start()
    two.callee.release(4)
    reader.join(BACKSTOP)
    assert answers == [None]
    assert outcome(two.call(mailbox=4)) == (CallEnd.REFUSED, "its mailbox is closed")
    assert two.callee.take(4, BACKSTOP, 1) is None
    assert outcome(two.call(mailbox=6)) == (CallEnd.REFUSED, "its mailbox is closed")
    two.callee.open(4)
    call = two.call(mailbox=4)
    assert two.callee.reply(two.taken(4), b"", [], None)
    assert outcome(call) is None


def test_mailbox_0_is_always_open(two: Two) -> None:
    two.callee.release(0)
    two.serve()
    assert outcome(two.call()) is None


def test_a_close_ends_whatever_waits() -> None:
    with no_leaks():
        two = Two("tcp")
        ends: list[object] = []
        waits = [
            threading.Thread(target=lambda: ends.append(two.caller.take(0, None, 1))),
            threading.Thread(target=lambda: ends.append(two.caller.completions(None))),
        ]
        for thread in waits:
            thread.start()
        call = two.call(timeout=None)
        two.caller.close(BACKSTOP)
        for thread in waits:
            thread.join(BACKSTOP)
        assert sorted(ends, key=str) == [None, [1]]
        assert two.caller.completions(None) is None
        assert outcome(call) == (CallEnd.CLOSED, "the endpoint was closed")
        assert outcome(two.call()) == (CallEnd.CLOSED, "the endpoint is closed")
        two.close()


def test_silence_counts_as_death_where_no_process_is_watched() -> None:
    with no_leaks():
        two = Two("tcp", heartbeat=0.4)
        call = two.call()
        two.callee.pause_heartbeats(True)
        end, text = outcome(call) or (None, "")
        assert end is CallEnd.LOST
        assert text.startswith("no message came from its host for ")
        two.close()


def sleeps() -> int:
    """How often the threads of posts have gone to sleep."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # another thread may just have ended
            if (task / "comm").read_text() == "shoal-rpc\n":
                words = (task / "status").read_text().split()
                total += int(words[words.index("voluntary_ctxt_switches:") + 1])
    return total


def test_a_call_wakes_the_thread_of_each_post_once() -> None:
    """The deadline of a call takes no wake-up where an earlier one had to be kept."""
    with no_leaks():
        two = Two("unix", pid=os.getpid())  # on one host there are no heartbeats to be kept anyway
        two.serve()
        assert two.call().wait(BACKSTOP)
        before = sleeps()
        for _ in range(500):
            assert two.call().wait(BACKSTOP)
        assert sleeps() - before < 2.5 * 500
        two.close()


def test_signals_interrupt_a_wait_and_the_call_goes_on(two: Two) -> None:
    call = two.call()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))

        def interrupted() -> None:
            timer.start()
            call.wait(None)

        with pytest.raises(KeyboardInterrupt):  # wherever this thread is when the signal comes
            interrupted()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    two.serve()
    assert outcome(call) is None


def _polls() -> int:
    return sum("eventpoll" in target for target in open_files())


def test_a_forked_child_has_no_use_of_the_post_and_none_of_its_descriptors(two: Two) -> None:
    call = two.call()
    polls = _polls()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 2
            two.caller.stats()
        except RuntimeError:
            two.caller.close(0.0)
            del call
            code = int(_polls() > polls - 2)  # each post has one; others of this process may live on
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    two.serve()
    assert outcome(call) is None


CHILD = """
import socket, sys, time
from shoal._core import RpcEndpoint
post = RpcEndpoint.make(1 << 30, 30.0)
peer = post.attach(int(sys.argv[1]), int(sys.argv[2]), 1)
letter = post.take(0, None, 1)[0]
post.post(peer, 8, b"last words", [], None, None)
time.sleep(600)
"""


def test_a_killed_peer_fails_its_calls_after_its_last_words() -> None:
    with no_leaks():
        post = RpcEndpoint.make(1 << 30, BACKSTOP)
        post.open(8)
        here, there = connected("unix")
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(there), str(os.getpid())], pass_fds=[there]
        )
        os.close(there)
        peer = post.attach(here, child.pid, 1)
        call = post.request(peer, 0, b"", [], None, None)
        until(lambda: post.waiting(8) == 1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        end, text = outcome(call) or (None, "")
        assert end is CallEnd.LOST
        assert text in ("its process has ended", "its connection closed")
        assert post.completions(BACKSTOP) == [1]
        letters = post.take(8, 0.0, 5)
        assert letters is not None
        assert [letter.head for letter in letters] == [b"last words"]
        post.close(BACKSTOP)
