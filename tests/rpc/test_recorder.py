"""What a worker waits for and serves, as lists, in errors, and in files."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from shoal.errors import CallTimeout
from shoal.launch.cli import invoke
from shoal.rpc import Agent, current
from shoal.rpc.calls import call
from shoal.testing import Agents
from tests.rpc import handlers
from tests.rpc.handlers import PATIENCE
from tests.support.waiting import until


def served(agent: Agent) -> list[tuple[str, str]]:
    return [(each.call, each.caller) for each in agent.recorder.served() if each.seconds is not None]


def blocked(a: Agent, b: Agent, key: str) -> Any:
    """A call of ``a`` that runs at ``b`` until ``key`` is noted."""
    future = a.peer(b.name).call(handlers.wait_for, key)
    until(lambda: ("tests.rpc.handlers.wait_for", a.name) in served(b))
    return future


def test_calls_are_listed_while_they_are_pending_and_served(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    peer = a.peer("b")
    peer.call(torch.add, torch.ones(2), 1).wait()
    with pytest.raises(ValueError, match="no such thing"):
        peer.call(handlers.fail, "value").wait()
    waiting = blocked(a, b, "go on")
    (pending,) = a.recorder.pending()
    assert (pending.call, pending.callee) == ("tests.rpc.handlers.wait_for", "b")
    assert pending.seconds >= 0
    assert a.recorder.served() == []
    assert repr(a.recorder).startswith("<CallRecorder of worker 'a': 1 call pending, 0 served;")
    assert "pending:" in a.recorder.dump()
    assert "served here:" in b.recorder.dump()
    handlers.note("go on")
    waiting.wait()
    until(lambda: not a.recorder.pending() and not b.recorder.served())


def test_a_call_is_listed_however_old_it_is_and_without_its_future(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    future = blocked(a, b, "go on")
    del future
    for _ in range(3000):
        a.peer("b").call(int).wait()
    assert [each.call for each in a.recorder.pending()] == ["tests.rpc.handlers.wait_for"]
    handlers.note("go on")
    until(lambda: not a.recorder.pending())


def test_a_call_that_waits_for_a_thread_is_listed_without_a_time(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE, handlers=1)
    running = blocked(a, b, "go on")
    queued = a.peer("b").call(int)
    until(lambda: [each.seconds is None for each in b.recorder.served()] == [False, True])
    handlers.note("go on")
    running.wait()
    queued.wait()


def test_a_timeout_names_what_else_is_pending_and_served(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    first = blocked(a, b, "go on")
    back = blocked(b, a, "go on")
    more = [a.peer("b").call(handlers.wait_for, "go on") for _ in range(4)]
    with pytest.raises(CallTimeout) as caught:
        a.peer("b").options(timeout=0.1).call(handlers.wait_for, "go on").wait()
    text = str(caught.value)
    assert "; also pending here: tests.rpc.handlers.wait_for at 'b' for " in text
    assert " and 2 more; served here: tests.rpc.handlers.wait_for of 'b' for " in text
    handlers.note("go on")
    for future in [first, back, *more]:
        future.wait()


def test_a_timeout_alone_names_nothing_more(meeting: Agents, a: Agent) -> None:
    meeting.join("b", timeout=PATIENCE)
    with pytest.raises(CallTimeout) as caught:
        a.peer("b").options(timeout=0.1).call(handlers.wait_for, "go on").wait()
    assert "pending" not in str(caught.value)
    handlers.note("go on")


def test_the_first_timeout_writes_a_file(
    meeting: Agents, a: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DUMP_DIR", str(tmp_path))
    meeting.join("b", timeout=PATIENCE)
    a.peer("b").call(int).wait()  # connecting takes none of the time
    hasty = a.peer("b").options(timeout=0.05)
    for _ in range(2):
        with pytest.raises(CallTimeout):
            hasty.call(handlers.wait_for, "go on").wait()
    (file,) = tmp_path.glob("shoal-*-a-rpc-*.json")
    content = json.loads(file.read_bytes())
    assert content["error"]["type"] == "CallTimeout"
    assert content["worker"] == "a"
    assert any(stack["thread"] == "MainThread" for stack in content["stacks"])
    handlers.note("go on")


def test_a_file_that_cannot_be_written_is_no_other_failure(
    meeting: Agents,
    a: Agent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_DUMP_DIR", str(tmp_path / "file"))
    meeting.join("b", timeout=PATIENCE)
    a.peer("b").call(int).wait()  # as above
    with pytest.raises(CallTimeout):
        a.peer("b").options(timeout=0.05).call(handlers.wait_for, "go on").wait()
    assert "worker 'a' cannot write a dump: SHOAL_DUMP_DIR=" in caplog.text
    handlers.note("go on")


def end_of_circle(name: str) -> None:
    current().agent.peer(name).call(handlers.blocked, "circle").wait()


def test_files_of_workers_show_who_waits_for_whom(
    meeting: Agents, a: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    future = a.peer("b").call(end_of_circle, "a")
    until(lambda: "circle runs" in handlers.noted)
    a.dump(tmp_path)
    b.dump(tmp_path)
    handlers.note("circle")
    future.wait()
    assert invoke(["dumps", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 workers, job ")
    rows = {line.split()[0]: line for line in lines if line.split()[:1] in (["a"], ["b"])}
    assert "tests.rpc.test_recorder.end_of_circle at 'b'" in rows["a"]
    assert "tests.rpc.handlers.blocked of 'b'" in rows["a"]
    assert "tests.rpc.handlers.blocked at 'a'" in rows["b"]
    assert "they wait for one another: 'a' -> 'b' -> 'a'" in lines


def wait_with_handler(agent: Agent, path: str) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: agent.dump(path))
    agent.peer("a").call(handlers.note, "ready").wait()
    agent.peer("a").call(handlers.blocked, "go on").wait()


def test_a_signal_shows_what_a_process_waits_for(
    meeting: Agents, a: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = meeting.start("b", wait_with_handler, str(tmp_path), timeout=PATIENCE)
    until(lambda: "go on runs" in handlers.noted)
    os.kill(pid, signal.SIGUSR1)
    until(lambda: list(tmp_path.glob("shoal-*-b-rpc-*.json")))
    handlers.note("go on")
    assert meeting.outcome("b").ok
    assert invoke(["dumps", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "tests.rpc.handlers.blocked at 'a'" in text
    assert "test_recorder.py" in text, "where its main thread stands"
    assert "no file of worker 'a', which others wait for" in text


def test_lists_may_be_asked_for_while_calls_come_and_go(meeting: Agents, a: Agent) -> None:
    b = meeting.join("b", timeout=PATIENCE)
    ended = threading.Event()
    wrong: list[BaseException] = []

    def look() -> None:
        try:
            while not ended.is_set():
                a.recorder.dump()
                b.recorder.served()
        except BaseException as error:
            wrong.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(20):
        for future in [a.peer("b").call(int) for _ in range(50)]:
            future.wait()
    ended.set()
    looking.join()
    assert not wrong


def test_only_functions_that_modules_have_keep_their_names() -> None:
    """Each call is listed by a name, and functions that come by value are others each time."""

    def local() -> None: ...

    by_value = FunctionType(handlers.echo.__code__, {}, "echo")
    by_value.__module__, by_value.__qualname__ = handlers.echo.__module__, handlers.echo.__qualname__
    assert {call.name_of(handlers.echo) for _ in range(2)} == {call.name_of(by_value)}
    assert call.name_of(local).endswith("<locals>.local")
    assert handlers.echo in call._names
    assert not {by_value, local} & call._names.keys()
