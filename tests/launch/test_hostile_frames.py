"""Whatever an agent says, the launcher says what is wrong with it; and the agent of what a launcher says."""

from __future__ import annotations

import os
import random
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.failure_report import Report
from shoal.launch import agent_protocol as frames
from shoal.launch.agent_protocol import (  # fmt: skip
    MAX_FRAME_BYTES,
    OUTPUT_WINDOW_BYTES,
    PREAMBLE,
    PROTOCOL,
    STDIN_WINDOW_BYTES,
    Beat,
    Begin,
    Bye,
    Close,
    End,
    Exited,
    Hello,
    ProcessOutput,
    Ready,
    Release,
    Reported,
    Signal,
    Start,
    Started,
    StdinData,
    StdinTaken,
    Taken,
)
from shoal.launch.commands.agent import AgentServer
from shoal.launch.ranks.guardian import Guardian
from shoal.launch.ranks.source import Pipe
from shoal.launch.remote.agent_client import AgentCallbacks, AgentClient, RemoteRank
from shoal.launch.remote.connection import DescriptorCarrier
from shoal.launch.remote.hosts import Host
from shoal.launch.remote.output_relay import OutputRelay
from shoal.launch.remote.ssh import SshProcess
from shoal.net import build_version, frame_header
from tests.support.waiting import until

HELLO = Hello(build_version(), PROTOCOL, "", "", 1)
#: a frame with a field that nobody knows, nested more deeply than Python's stack is deep
DEEP = b"\x82\xa4type\xa5Ready\xa1x" + b"\x91" * 50_000 + b"\xc0"
#: seconds in which a frame is answered
SOON = 30.0


def framed(*sent: Any) -> bytes:
    encoded = [each if isinstance(each, bytes) else msgspec.msgpack.encode(each) for each in sent]
    return b"".join(frame_header(len(each)) + each for each in encoded)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """``data`` with a few bytes changed, left out, or put in."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(changed) + 1)
        match dice.randrange(3):
            case 0:
                changed[place : place + 1] = dice.randbytes(1)
            case 1:
                del changed[place : place + dice.randint(1, 8)]
            case 2:
                changed[place:place] = dice.randbytes(dice.randint(1, 8))
    return bytes(changed)


# -- the launcher ------------------------------------------------------------------------------


class Stranger(SshProcess):
    """A client without a process: the test is the agent."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        self.carrier = DescriptorCarrier(*[mine.detach()] * 2)
        reading, writing = os.pipe()
        os.close(writing)
        self.stderr = Pipe(os.fdopen(reading, "rb", 0))
        self.agent = theirs
        self.agent.setblocking(False)

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        self.stderr.ignore()
        if selector is not None:
            self.stderr.listen(selector, self.stderr.ignore)

    @property
    def stderr_tail(self) -> list[str]:
        return []

    def end(self, timeout: float) -> int | None:
        self.waited = timeout
        self.stderr.close()
        return None


class Listener:
    """An agency with two ranks, whose agent is the test."""

    def __init__(self) -> None:
        self.client = Stranger()
        self.agent = AgentClient(Host("h1", 2, 0), self.client)
        self.lost: list[str] = []
        self.agent.watcher = AgentCallbacks(
            lambda agent, ranks: self.lost.append(agent.failure), lambda rank, text: None, lambda amount: None
        )
        self.selector = selectors.DefaultSelector()
        self.agent.watch(self.selector)
        self.relays: deque[OutputRelay] = deque()
        self.ranks = [
            RemoteRank(index, index, 0, agent=self.agent, relays=self.relays, size=2, newcomer=False)
            for index in range(2)
        ]
        for rank in self.ranks:
            self.agent.add(rank)
            for relay in (rank.stdout, rank.stderr):
                relay.listen(self.selector, lambda: None)

    def read(self, data: bytes) -> str:
        """Send ``data`` as the agent and then hang up; the trouble that the launcher has with it."""
        view = memoryview(data)
        end = time.monotonic() + SOON
        while not self.agent.failure:
            assert time.monotonic() < end
            if view:
                try:
                    view = view[self.client.agent.send(view) :]
                except BlockingIOError:
                    pass
                except OSError:
                    view = view[:0]
            else:
                self.client.agent.close()
            for key, _ in self.selector.select(0.01):
                key.data()
            self.agent.tick(time.monotonic())
        assert all(rank.status is not None for rank in self.ranks)
        return self.agent.failure

    def close(self) -> None:
        self.agent.disconnect()
        self.agent.close(0)
        self.client.agent.close()
        self.selector.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener()) as listener:
        yield listener


STARTED = (HELLO, Ready(), Started(0, 10), Started(1, 11))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"x" * 70_000, "the program that answers is not an agent of shoal"),
        (PREAMBLE + framed(b"\xff"), "it sent a malformed frame: "),
        (PREAMBLE + framed(HELLO, DEEP), "it sent a malformed frame: lists or maps are nested too deeply"),
        (PREAMBLE + frame_header(MAX_FRAME_BYTES + 1), f"a frame of {MAX_FRAME_BYTES + 1} bytes came"),
        (PREAMBLE + framed(Ready()), "it must send Hello once, as its first frame"),
        (PREAMBLE + framed(HELLO, HELLO), "it must send Hello once, as its first frame"),
        (PREAMBLE + framed(HELLO, ProcessOutput(0, 1, b"x")), "it sent an unexpected ProcessOutput"),
        (PREAMBLE + framed(HELLO, Ready(), Ready()), "it sent an unexpected Ready"),
        (PREAMBLE + framed(HELLO, Beat(1e9, 0.0)), "it replied to a heartbeat that was not sent"),
        (PREAMBLE + framed(HELLO, Beat(float("nan"), 0.0)), "it replied to a heartbeat that was not sent"),
        (PREAMBLE + framed(HELLO, Ready("no room")), "no room"),
        (PREAMBLE + framed(msgspec.structs.replace(HELLO, version="7")), "it runs shoal 7 "),
        (PREAMBLE + framed(*STARTED, Started(0, 12)), "it sent an unexpected Started"),
        (PREAMBLE + framed(*STARTED, ProcessOutput(2, 1, b"x")), "it sent a frame about process 2, which"),
        (
            PREAMBLE + framed(*STARTED, ProcessOutput(0, 1, b""), ProcessOutput(0, 1, b"x")),
            "it sent output after its end",
        ),
        (PREAMBLE + framed(*STARTED, *[Exited(0, 1, 0.0, 1.0)] * 2), "process 0 ended twice"),
        (PREAMBLE + framed(*STARTED, Exited(0, 300, 0.0, 1.0)), "it sent a malformed frame: "),
        (PREAMBLE + framed(*STARTED, Reported(0, False, (Report("told", 1.0, (7,)),))), "name unknown ranks"),
        (PREAMBLE + framed(*STARTED, Bye(())), "it sent Bye while processes were running"),
        (
            PREAMBLE + framed(*STARTED, *[ProcessOutput(0, 1, bytes(1 << 16))] * 66),
            "it sent more output than",
        ),
        (
            PREAMBLE + framed(*STARTED, {"type": "ProcessOutput", "index": 0, "stream": 3, "data": b""}),
            "a malformed frame",
        ),
        (PREAMBLE + framed(*STARTED)[:-3], "the connection has ended"),
    ],
)  # fmt: skip
def test_an_agent_that_breaks_the_rules_is_lost_with_the_reason(
    listener: Listener, sent: bytes, words: str
) -> None:
    assert words in listener.read(sent)


def test_moments_that_cannot_be_are_put_into_the_life_of_the_rank(listener: Listener) -> None:
    begin = time.monotonic()
    listener.read(
        PREAMBLE
        + framed(
            *STARTED,
            Reported(0, False, (Report("failed", float("nan")), Report("left", float("-inf")))),
            Exited(0, 1, float("inf"), float("nan")),
        )
    )
    rank = listener.ranks[0]
    assert (rank.status, rank.lost) == (1, "")
    moments = [*(report.at for report in rank.reports), rank.ended_at]
    assert len(moments) == 3
    assert all(begin - 1 <= moment <= time.monotonic() for moment in moments)
    assert 0 <= rank.seconds < SOON


def test_an_agents_clock_may_differ_by_any_time(listener: Listener) -> None:
    """Its moments are put on the launcher's clock by the answers to beats."""
    now = time.monotonic()
    listener.read(
        PREAMBLE
        + framed(
            *STARTED,
            Beat(now, now + 5000.0),
            Reported(0, False, (Report("left", now + 5000.0),)),
            Exited(0, 1, now + 5000.0, 1.0),
        )
    )
    late = time.monotonic() - now  # as long as the answer may have been under way
    (report,) = listener.ranks[0].reports
    assert abs(report.at - now) <= late
    assert abs(listener.ranks[0].ended_at - now) <= late


def test_of_many_hosts_that_are_lost_at_once_the_loop_waits_for_one() -> None:
    """Beats for the others would be late."""
    with closing(Listener()) as first, closing(Listener()) as second, closing(Listener()) as third:
        listeners = (first, second, third)
        for listener in listeners:
            listener.agent.mark_lost("the network is gone")
        assert [listener.client.waited for listener in listeners][1:] == [0.0, 0.0]


def test_nothing_is_due_at_once_while_an_agent_takes_long_to_answer(listener: Listener) -> None:
    late = time.monotonic() + 100.0
    listener.agent.tick(late)
    assert late < listener.agent.next_at()
    assert not listener.agent.failure


def test_of_a_process_that_was_not_started_the_agent_is_told_no_more(listener: Listener) -> None:
    """It knows none, and the slot gets another one."""
    listener.read(PREAMBLE + framed(HELLO, Ready(), Started(0, None, "no"), Started(1, 11)))
    assert listener.ranks[0].status == 127
    assert listener.ranks[0].is_released


def test_what_an_agent_says_moves_no_cursor(listener: Listener) -> None:
    assert listener.read(PREAMBLE + framed(HELLO, Ready("a\x1b[2Jb\nc"))).startswith("a?[2Jb?c")


def test_mutated_frames_of_an_agent_end_in_words() -> None:
    dice = random.Random(7)
    good: list[Callable[[], Any]] = [
        lambda: ProcessOutput(dice.randrange(3), dice.randint(1, 2), dice.randbytes(dice.randrange(20))),
        lambda: Exited(dice.randrange(3), dice.randrange(-64, 256), 1.0, 1.0),
        lambda: Reported(dice.randrange(2), True, (Report("told", 1.0, (1,)),)),
        lambda: Started(dice.randrange(3), None, "no"),
        lambda: StdinTaken(dice.randrange(5)),
        lambda: Bye(("x",)),
        lambda: Beat(0.0, 1.0),
    ]
    for _ in range(300):
        sent = framed(*STARTED[: dice.randrange(5)], *(dice.choice(good)() for _ in range(dice.randrange(8))))
        with closing(Listener()) as listener:
            assert listener.read(PREAMBLE + mutated(sent, dice))


# -- the agent ---------------------------------------------------------------------------------


class Served:
    """An agent whose launcher is the test."""

    def __init__(self) -> None:
        mine, self.launcher = socket.socketpair()
        self.guardian = Guardian()
        carrier = DescriptorCarrier(*[mine.detach()] * 2)
        self.agent = AgentServer(carrier, self.guardian, 1, ("", ""), lambda number: False)

    def read(self, data: bytes) -> str:
        """Send ``data`` as the launcher and then hang up; why the agent ends."""
        self.launcher.setblocking(False)
        self.launcher.send(data)
        self.launcher.shutdown(socket.SHUT_WR)
        begin = time.monotonic()
        why = self.agent.run()
        assert time.monotonic() - begin < SOON
        return why

    def close(self) -> None:
        self.agent.close()
        self.launcher.close()
        self.guardian.__exit__(None, None, None)


BEGIN = Begin("/", {}, 1, False)


def start(index: int = 0, *, stdin: bool = False) -> Start:
    return Start(index, index, 0, index, 2, ("sleep", "600"), {"A": "b"}, False, stdin)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.chdir("/")
    with closing(Served()) as served:
        yield served


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (framed(b"\x00"), "it sent a malformed frame: "),
        (
            framed(BEGIN, DEEP.replace(b"\xa5Ready", b"\xa3End")),
            "it sent a malformed frame: lists or maps are nested too deeply",
        ),
        (frame_header(MAX_FRAME_BYTES + 1), "bytes came, at most"),
        (framed(start()), "process 0 cannot be started now"),
        (framed(BEGIN, BEGIN), "it sent Begin twice"),
        (framed(BEGIN, start(), start()), "process 0 cannot be started now"),
        (framed(BEGIN, start(), Release(0)), "process 0 has not ended and cannot be released"),
        (framed(BEGIN, Taken(1)), "it acknowledged more output than was sent"),
        (framed(BEGIN, start(stdin=True), start(1, stdin=True)), "stdin was requested for a second process"),
        (
            framed(BEGIN, start(stdin=True), *[StdinData(bytes(STDIN_WINDOW_BYTES))] * 4),
            "it sent stdin beyond the",
        ),
        (framed(BEGIN, StdinData(b""), StdinData(b"x")), "it sent stdin beyond the"),
        (
            framed(BEGIN, start(), {"type": "Signal", "index": 0, "number": 0, "group": True}),
            "malformed frame",
        ),
        (framed(BEGIN, start(), Signal(9, 9, True)), "the connection has ended"),
        (framed(BEGIN, start(), Release(9), Close(9, 1)), "the connection has ended"),
        (framed(BEGIN, {"type": "Taken", "amount": OUTPUT_WINDOW_BYTES + 1}), "malformed frame"),
        (framed(BEGIN, start())[:-3], "the connection has ended"),
    ],
)
def test_a_launcher_that_breaks_the_rules_is_left_with_the_reason(
    served: Served, sent: bytes, words: str
) -> None:
    assert words in served.read(sent)


def test_an_agent_stays_until_its_last_output_is_on_its_way(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a slow line that takes longer than the launcher has to read the farewell."""
    monkeypatch.setattr("shoal.launch.commands.agent._BYE_TIMEOUT_S", 0.05)
    script = f"head -c 2000000 /dev/zero; touch {tmp_path}/written; sleep 600"
    served.launcher.send(framed(BEGIN, msgspec.structs.replace(start(), argv=("sh", "-c", script))))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(served.agent.run)
        until((tmp_path / "written").exists)
        served.launcher.send(framed(End(0.0)))
        came = bytearray()
        for _ in range(10):  # slowly, while beats come
            time.sleep(0.05)
            served.launcher.send(framed(Beat(1.0)))
            came += served.launcher.recv(1000)
        while b"Bye" not in came[-1000:] and (data := served.launcher.recv(1 << 16)):
            came += data
        served.launcher.shutdown(socket.SHUT_RDWR)
        assert b"Bye" in came[-1000:]
        assert len(came) > 2_000_000
        assert serving.result(SOON) == ""


def test_output_that_still_comes_keeps_an_ending_agent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.remote.agent_client._REPLY_TIMEOUT_S", 0.0)
    agent = listener.agent
    sent = framed(*STARTED, Exited(0, 0, 0.0, 1.0), Exited(1, 0, 0.0, 1.0))

    def turn() -> None:
        for key, _ in listener.selector.select(0.01):
            key.data()

    def came() -> bytes:
        turn()
        with suppress(BlockingIOError):
            return listener.ranks[0].stdout.read()
        return b""

    listener.client.agent.send(PREAMBLE + sent)
    until(lambda: turn() or all(rank.status == 0 for rank in listener.ranks))
    agent.expect_bye(0.0)
    for _ in range(3):
        listener.client.agent.send(framed(ProcessOutput(0, 1, b"x")))
        assert until(came) == b"x"
        agent.tick(time.monotonic())
        assert not agent.failure
    agent.tick(time.monotonic())
    assert "its agent has not ended its processes as requested" in agent.failure


@pytest.mark.parametrize("bad", [{"A=": "x"}, {"A": "\0"}, {"": ""}])
def test_an_environment_that_cannot_be_is_an_answer_and_no_end(served: Served, bad: dict[str, str]) -> None:
    frame = msgspec.structs.replace(start(), variables=bad)
    assert "the connection has ended" in served.read(framed(BEGIN, frame))
    assert b"could not be started" in served.launcher.recv(1 << 16) or bad == {"": ""}


def test_mutated_frames_of_a_launcher_end_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    dice = random.Random(8)
    good: list[Callable[[], Any]] = [
        lambda: msgspec.structs.replace(start(dice.randrange(3)), argv=("true",)),
        lambda: Signal(dice.randrange(3), dice.choice([2, 9, 10, 15]), dice.random() < 0.5),
        lambda: Close(dice.randrange(3), dice.randint(1, 2)),
        lambda: StdinData(dice.randbytes(dice.randrange(9))),
        lambda: Taken(dice.randrange(3)),
        lambda: Beat(1.0),
    ]
    for _ in range(60):
        sent = framed(BEGIN, *(dice.choice(good)() for _ in range(dice.randrange(8))))
        with closing(Served()) as served:
            # It may also be told to end in order.
            served.read(mutated(sent, dice))


def test_every_frame_has_bounds() -> None:
    """No field of the two directions is text or bytes of any length, but for what a user may make as long."""
    free = {"Begin.directory", "Begin.environment", "Start.argv", "Start.variables"}
    for name, kind in vars(frames).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == frames.__name__:
            for field in msgspec.structs.fields(kind):
                if f"{name}.{field.name}" not in free:
                    assert field.type not in (str, bytes, int) or (name, field.name) == ("Hello", "protocol")
