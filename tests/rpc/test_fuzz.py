"""Frames that no honest worker sends, over real sockets: the agent cuts them off, and serves the others.

``make test`` sends a few hundred of each kind, ``make stress`` ten thousand.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from shoal import net as wire
from shoal.errors import ShoalError, WaitTimeout
from shoal.net import Connection
from shoal.net.handshake import Handshake
from shoal.rpc.calls.call import FAILURE, FUNCTION
from shoal.rpc.codec import plain
from shoal.rpc.codec.pickled import encode
from shoal.rpc.connection.endpoint import Endpoint
from shoal.testing import Agents, no_leaks
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.support.waiting import until

FEW = 200
MANY = 1_000 if os.environ.get("STRESS") == "short" else 10_000

amounts = pytest.mark.parametrize("amount", [FEW, pytest.param(MANY, marks=pytest.mark.stress)])


class Attack:
    """An agent under attack, and honest ones, one of which calls it all the time.

    Attributes:
        target: the agent.
        evil: an agent whose secret and name the attacker uses.
    """

    def __init__(self, stage: Agents) -> None:
        self.target = stage.join("target", timeout=PATIENCE)
        self.evil = stage.join("evil", timeout=PATIENCE)
        self._honest = stage.join("honest", timeout=PATIENCE).peer("target")
        self._late = stage.join("late", timeout=PATIENCE)
        self._ended = threading.Event()
        self._wrong: list[BaseException] = []
        self._served = 0
        self._thread = threading.Thread(target=self._call)

    def _call(self) -> None:
        try:
            while not self._ended.wait(0.002):
                assert self._honest.call(handlers.echo, 7).wait() == 7
                self._served += 1
        except BaseException as error:
            self._wrong.append(error)

    def __enter__(self) -> Attack:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        served = self._served
        until(lambda: self._wrong or self._served > served)  # after the attack, however short that was
        self._ended.set()
        self._thread.join()
        assert not self._wrong
        if kind is None:
            # Its threads live, and a new connection works as the first did.  It is not one of evil's, as a
            # spoilt introduction may be a correct one with a higher number, which rules out its connections.
            for acceptor in self.target.connections._threads:
                assert acceptor.is_alive()
            assert self._late.peer("target").call(handlers.echo, torch.ones(100_000)).wait().sum() == 100_000

    def dial(self, choose: random.Random) -> socket.socket:
        """A connection on which nothing was said yet."""
        if choose.random() < 0.5:
            return socket.create_connection((self.target.worker.address, self.target.worker.port), PATIENCE)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE)
        sock.connect(b"\0" + self.target.worker.unix.encode())
        return sock

    def proved(self, choose: random.Random) -> Connection:
        """A connection on which the handshake is over."""
        worker, how = self.target.worker, {"secret": self.evil.secret, "purpose": "rpc"}
        if choose.random() < 0.5:
            return wire.connect(worker.address, worker.port, timeout=PATIENCE, **how)  # type: ignore[arg-type]
        return wire.connect_unix(worker.unix, timeout=PATIENCE, **how)  # type: ignore[arg-type]

    def introduced(self, choose: random.Random) -> socket.socket:
        """A connection on which letters are expected."""
        with contextlib.closing(self.proved(choose)) as connection:
            hello = self.evil.connections._hello(self.target.worker.incarnation, {})
            hello.lends = False  # or descriptors were expected
            wire.send_hello(connection, hello, PATIENCE)
            sock = socket.socket(fileno=connection.detach())
        sock.settimeout(PATIENCE)
        return sock


@pytest.fixture
def attack() -> Iterator[Attack]:
    with Agents() as stage, Attack(stage) as attack:
        attack.evil.peer("target").call(handlers.echo, 1).wait()
        yield attack


def spoilt(message: bytes, choose: random.Random) -> bytes:
    """``message`` with something wrong."""
    kind = choose.randrange(5)
    if kind == 0 and message:
        return message[: choose.randrange(len(message))]
    if kind == 1:
        return message + choose.randbytes(choose.randrange(1, 200))
    if kind == 2:
        return choose.randbytes(choose.choice((1, 10, 100, 2_000)))
    data = bytearray(message)
    for _ in range(choose.choice((1, 1, 2, 10))):
        data[choose.randrange(len(data))] = choose.choice((0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)))
    if kind == 3:
        at = choose.randrange(len(data))
        data[at : at + 8] = struct.pack("<Q", choose.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
    return bytes(data)


def say(sock: socket.socket, *messages: bytes) -> None:
    """Send until the other side has had enough."""
    with contextlib.suppress(OSError):
        for message in messages:
            sock.sendall(message)


@amounts
def test_strangers_say_anything_and_an_honest_worker_is_served(attack: Attack, amount: int) -> None:
    choose = random.Random(amount)
    silent = []
    for number in range(amount // 2):  # two messages each
        greeting = Handshake(connecting=True, secret=attack.evil.secret, purpose="rpc").greeting
        sock = attack.dial(choose)
        first = spoilt(greeting, choose) if choose.random() < 0.5 else greeting
        say(sock, first, choose.randbytes(choose.choice((1, 31, 32, 33, 1000))))
        if number % 50 == 0:
            silent.append(sock)
        else:
            sock.close()
    for sock in silent:
        sock.close()


@amounts
def test_introductions_in_other_words_are_cut_off(attack: Attack, amount: int) -> None:
    choose = random.Random(amount)
    hello = msgspec.msgpack.encode(attack.evil.connections._hello(attack.target.worker.incarnation, {}))
    others = [
        msgspec.msgpack.encode(each)
        for each in (
            None,
            1,
            "x",
            [],
            {},
            {"worker": None},
            {"worker": {}, "place": "", "to": "", "main": ""},
        )
    ]
    for _ in range(amount):
        with contextlib.closing(attack.proved(choose)) as connection:
            if choose.random() < 0.2:
                say(connection.socket, spoilt(struct.pack("<I", len(hello)) + hello, choose))
                continue
            with contextlib.suppress(ShoalError):
                connection.send(
                    choose.choice(others) if choose.random() < 0.1 else spoilt(hello, choose), 1.0
                )


def captured() -> list[bytes]:
    """What an honest worker writes to its socket: calls and posts, with parts of all kinds."""
    frames = []
    endpoint = Endpoint("captured", 1 << 20, 30.0)
    try:
        for parts in ([], [torch.ones(10)], [torch.ones(2_000), torch.ones(10_000)], [torch.ones(200_000)]):
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                theirs.settimeout(PATIENCE)
                peer = endpoint.attach(ours.detach(), 0, lambda: None)
                given = [(x.data_ptr(), 4 * x.numel()) for x in parts]
                for mailbox in (0, 1, 16):
                    endpoint.post.request(peer, mailbox, b"head", given, parts, 60.0)
                endpoint.post.post(peer, 0, b"head", given, parts, 60.0)
                frames.append(theirs.recv(1 << 20))
    finally:
        endpoint.close(0.0)
    return frames


@amounts
def test_letters_that_nobody_writes_are_cut_off(attack: Attack, amount: int) -> None:
    choose = random.Random(amount)
    frames = captured()
    assert all(len(frame) > 100 for frame in frames)
    before = attack.target.stats()["peers"]
    for _ in range(amount):
        with attack.introduced(choose) as sock:
            frame = choose.choice(frames)[: choose.choice((300, 2_000, 1 << 20))]
            head = spoilt(frame[:200], choose)
            say(sock, head, frame[200:])
    end = threading.Event()
    while attack.target.stats()["peers"] > before + 1:  # and the last call of the attacker's own agent
        end.wait(0.01)


def malformed(choose: random.Random) -> bytes:
    """The head of a call that no agent writes; what is pickled is harmless, since workers are trusted."""
    good = encode((handlers.echo, (1, torch.ones(3)), {}), None, "a test").head
    at = choose.randrange(len(good))
    wrong: list[Any] = [
        None, 1, (), (1, 2), (1, (), {}), (None, (), {}), (handlers.echo, 1, {}), (handlers.echo, (), 1),
        (handlers.echo, (), {1: 2}), ((), {}), [handlers.echo, (), {}], (handlers.echo, (), {}, 1),
    ]  # fmt: skip
    counts = (0, 1, 2, 1000, 2**31, 2**32 - 1)
    return choose.choice(
        (
            b"",
            choose.randbytes(choose.randrange(1, 12)),
            FUNCTION.pack(choose.randrange(2**32), choose.randrange(2)),
            FUNCTION.pack(choose.randrange(2**32), 0) + good,
            FUNCTION.pack(0xFFFFFFFF, 0) + good,
            FUNCTION.pack(0, 1) + good[:at],
            FUNCTION.pack(0, 1) + struct.pack("<I", choose.choice(counts)) + good[4:],
            FUNCTION.pack(7, 1) + good,  # a tensor whose memory did not come
            FUNCTION.pack(7, choose.randrange(2))
            + struct.pack("<I", 0)
            + pickle.dumps(choose.choice(wrong), 5),
        )
    )


@amounts
def test_a_malformed_call_fails_alone(attack: Attack, amount: int) -> None:
    choose = random.Random(amount)
    connection = attack.evil.connection("target", PATIENCE)
    post = attack.evil.endpoint.post
    threads = 2  # those that a busy machine has added may end
    calls = []
    for number in range(amount):
        mailbox = choose.choice((0, 0, 1))
        memory = torch.zeros(choose.choice((0, 1, 12, 100)), dtype=torch.uint8)
        parts = [(memory.data_ptr(), memory.numel())] * choose.choice((0, 0, 1, 3))
        head = malformed(choose)
        if choose.random() < 0.1:
            post.post(connection.number, mailbox, head, parts, memory, PATIENCE)
        else:
            calls.append(post.request(connection.number, mailbox, head, parts, memory, PATIENCE))
        if number % 50 == 0:
            assert attack.evil.peer("target").call(handlers.echo, 3).wait() == 3
    failed = 0
    for call in calls:
        assert call.wait(PATIENCE)
        assert call.error() is None, "no reply"
        failed += call.reply().failed
    assert failed > amount // 2
    assert attack.target.executor.thread_count() >= threads


@amounts
def test_a_restricted_worker_answers_every_malformed_call(amount: int, caplog: Any) -> None:
    """None of them ends a thread of it, makes an object there, or keeps it from honest callers."""
    caplog.set_level("CRITICAL", "shoal")  # what was posted in vain
    choose = random.Random(amount)
    arguments = (torch.ones(3), [1, {"a": None}], torch.ones(2, 3).t(), torch.tensor([True]))
    with Agents() as stage:
        served = {"echo": handlers.echo, "double": handlers.async_double, "later": handlers.later}
        target = stage.join("target", timeout=PATIENCE, serve=served)
        honest = stage.join("honest", timeout=PATIENCE).peer("target")
        evil = stage.join("evil", timeout=PATIENCE)
        messages = [plain.encode_call(name, arguments[:n], {}, "a test") for name, n in TAKES.items()]
        number, post = evil.connection("target", PATIENCE).number, evil.endpoint.post
        threads, calls = 2, []  # threads that a busy machine has added may end
        for turn in range(amount):
            message = choose.choice(messages)
            parts = [(at, choose.choice((size, size, size // 2))) for at, size in message.parts]
            del parts[choose.choice((len(parts), len(parts), 1)) :]
            what = (choose.choice((0, 0, 0, 1, 16)), spoilt(message.head, choose), parts, message.keep)
            if choose.random() < 0.1:
                post.post(number, *what, PATIENCE)
            else:
                calls.append((post.request(number, *what, PATIENCE), message))
            if turn % 50 == 0:
                assert honest.call("echo", 3).wait() == 3
        failed = 0
        for call, _ in calls:
            assert call.wait(PATIENCE)
            failed += call.error() is not None or call.reply().failed
        assert failed > amount // 2
        assert target.executor.thread_count() >= threads
        assert target.leaks() == []


#: what a restricted worker serves, and how many arguments it is given
TAKES = {"echo": 4, "double": 1, "later": 2}


def malformed_reply(choose: random.Random) -> tuple[bytes, bool]:
    """The head of a reply that no agent writes, and whether it says that the call failed."""
    good = encode([1, torch.ones(3)], None, "a test").head
    words = choose.choice((b"", b"\xc0", msgspec.msgpack.encode({"worker": 1}), choose.randbytes(20)))
    if choose.random() < 0.5:
        length = choose.choice((0, len(words), len(words) + 1, 2**32 - 1))
        return choose.choice((b"", b"\0", FAILURE.pack(length) + words, good)), True
    return choose.choice(
        (b"", b"\1", good[: choose.randrange(len(good))], good, b"\xff" * 4 + good[4:])
    ), False


@amounts
def test_a_malformed_reply_fails_its_call_alone(attack: Attack, amount: int) -> None:
    choose = random.Random(amount)

    def answer(message: Any) -> None:
        head, failed = malformed_reply(choose)
        attack.evil.endpoint.post.reply(message, head, [], None, failed, choose.randrange(2))

    attack.evil.executor.handle = answer
    evil = attack.target.peer("evil")
    failed = 0
    for number in range(amount):
        try:
            evil.call(handlers.echo, number).wait(PATIENCE)
        except WaitTimeout:
            raise
        except Exception:
            failed += 1
    assert failed > amount // 2


def test_an_attack_leaves_nothing_behind() -> None:
    def use() -> None:
        with Agents() as stage, Attack(stage) as attack:
            choose = random.Random(3)
            frames = captured()
            for _ in range(20):
                with attack.introduced(choose) as sock:
                    say(sock, spoilt(choose.choice(frames)[:300], choose))
                with attack.dial(choose) as sock:
                    say(sock, choose.randbytes(100))
                with contextlib.closing(attack.proved(choose)) as connection:
                    say(connection.socket, choose.randbytes(100))

    use()  # what stays for ever comes with the first use
    with no_leaks():
        use()
