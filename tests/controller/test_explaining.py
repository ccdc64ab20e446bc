"""What a tensor's history tells, and what becomes of it."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.commands import history
from shoal.controller.node.execute import SpaceExecutor
from shoal.controller.node.history import BatchReply
from shoal.controller.node.session_state import SessionState
from shoal.controller.protocol.commands import FIRST, WIDTHS
from tests.controller import delays
from tests.controller.delays import held
from tests.controller.nodes import Crew, Program, programs
from tests.support.waiting import until

start = pytest.fixture(programs)
NODE = "node:0"


def here() -> str:
    """The caller's line, as explanations have it."""
    frame = inspect.stack()[1]
    assert frame.code_context is not None
    return f"{frame.filename}:{frame.lineno}, in {frame.function}: {frame.code_context[0].strip()}"


def test_a_tensor_is_explained_by_the_line_and_operator_that_made_it(master: Master) -> None:
    x = torch.ones(2, 3, device=NODE)
    y, line = x + 1, here()
    y.tolist()
    torch.zeros(3, device=NODE)
    told = master.explain(y)
    assert (told.operator, told.line, told.age, told.state) == ("aten.add.Tensor", line, 2, "executed")
    assert (told.place, told.device, told.within) == ("node 0", torch.device(NODE), -1)
    assert (told.shape, told.dtype, told.error, told.changed) == ((2, 3), torch.float32, None, "")
    assert str(told) == (
        f"float32[2, 3] on node 0: executed\nmade by aten.add.Tensor, 2 operations ago\nissued at {line}"
    )
    assert repr(told) == f"<shoal.controller.Explanation: {told}>"
    y.mul_(2), (line := here())  # type: ignore[func-returns-value]
    assert master.explain(y).changed == line
    assert master.explain(y.detach()).operator == "aten.add.Tensor"  # the same tensor there
    with pytest.raises(shoal.UsageError, match="explain takes a tensor on a node, and this one is on cpu"):
        master.explain(torch.ones(1))


def test_each_tensor_that_an_operation_writes_to_is_known_to_be_changed(master: Master) -> None:
    x, y, z = (torch.ones(3, device=NODE) for _ in range(3))
    torch._foreach_add_([x, y], 1.0), (line := here())
    assert [master.explain(each).changed == line for each in (x, y, z)] == [True, True, False]
    torch.add(x, y, out=z), (line := here())
    assert [master.explain(each).changed == line for each in (x, y, z)] == [False, False, True]


def test_what_no_operation_made_is_explained_too(master: Master) -> None:
    place = master.place([0, 2])
    made: list[tuple[torch.Tensor, str, str]] = [
        (torch.ones(3).to(NODE), "a copy from the master", "node 0"),
        (torch.ones(3, device=NODE).nonzero(), "aten.nonzero", "node 0"),
        (master.call(NODE, torch.ones, 2), "a result of a function", "node 0"),
        (place.scatter([torch.ones(2), torch.zeros(2)]), "a tensor elsewhere", "nodes 0, 2"),
        (place.replicate(torch.ones(2)).on(2), "a tensor elsewhere", "node 2"),
        (torch.ones(2, device=NODE).to("node:1"), "a copy from another node", "node 1"),
        (torch.ones(2, device=NODE).to("node:1", torch.float64), "aten._to_copy", "node 1"),
        (place.mean(torch.ones(2, device=place.device)), "a tensor elsewhere", "node 0"),
        (torch.ones(2, device=place.device).split(1)[1], "aten.split.Tensor", "nodes 0, 2"),
    ]
    for tensor, operator, where in made:
        told = master.explain(tensor)
        assert (told.operator, told.place) == (operator, where)
        assert __file__ in told.line
    master.synchronize()
    assert [master.explain(each).state for each, _, _ in made] == ["executed"] * len(made)


def test_what_waits_is_pending_and_explained_without_a_wait(master: Master) -> None:
    line = master._nodes[0]
    line.call(delays.know_naps).wait()
    x = torch.ones(3, device=NODE)
    master.synchronize()
    with master._lock:  # nothing is sent
        y = x + 1
        told = master.explain(y)
        assert (told.state, told.age) == ("pending", 0)
    held(x)  # the node does nothing after this
    y = y * 2
    try:
        until(lambda: not line.streams[0].waiting)  # all is sent
        told = master.explain(y)
        assert (told.state, told.operator, told.age) == ("pending", "aten.mul.Tensor", 0)
    finally:
        line.call(delays.let_go).wait()
    assert y.tolist() == [4, 4, 4]
    assert master.explain(y).state == "executed"


def test_a_poisoned_tensor_has_its_error_also_on_another_node(master: Master) -> None:
    x = torch.ones(3, device=NODE)
    y, line = x[torch.tensor([7], device=NODE)], here()
    z = y.to("node:1") + 1
    place = master.place([0, 1])
    with pytest.raises(shoal.RemoteOpError):
        z.tolist()
    for each in (y, y + 1, z):
        each.add(1)
    _settled(master)
    for each in (y, z):
        told = master.explain(each)
        assert told.state == "poisoned"
        assert isinstance(told.error, shoal.RemoteOpError)
        assert told.error.line == line
        assert "RemoteOpError: node 0: aten.index.Tensor" in str(told)
    assert master.explain(x).state == "executed"
    assert len(place) == 2


def _settled(master: Master) -> None:
    """Wait until the nodes have done everything, whatever failed."""
    for index in range(3):
        torch.zeros(1, device=f"node:{index}").tolist()


def test_what_was_long_ago_is_not_known(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # the freeing of many tensors, of other tests, would be what was done last
    monkeypatch.setattr(history, "MAX_HISTORY_OPERATIONS", 100)
    x = torch.ones(3, device=NODE)
    y = x
    for _ in range(600):
        y = x + 1
    y.tolist()
    told = master.explain(x)
    assert (told.operator, told.line, told.age, told.state) == ("", "", None, "executed")
    assert "made by an operation that is no longer in the history" in str(told)
    assert master.explain(y).operator == "aten.add.Tensor"


def test_the_numbers_of_calls_may_stand_for_others_after_a_while(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controller.tensor.calls.MAX_INTERNED_CALLS", 8)
    x = torch.arange(64.0, device=NODE)
    made = [(x[:length] * length, "aten.mul.Tensor") for length in range(1, 12)]
    made += [(x[:length].sum(), "aten.sum") for length in range(1, 12)]
    for tensor, operator in made:
        assert master.explain(tensor).operator == operator


def test_a_log_that_ends_where_calls_are_forgotten_is_read(master: Master) -> None:
    x = torch.ones(3, device=NODE).exp()
    with master._lock:
        master.space(0).forget()
        assert master.explain(x).operator == "aten.exp"


def test_a_recorded_step_is_explained_as_one(master: Master) -> None:
    @master.recorded
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    results = [step(torch.ones(3, device=NODE)) for _ in range(5)]
    told = master.explain(results[-1])
    assert told.operator == "a recorded step"
    assert "return x * 2 + 1" in told.line


def test_the_stream_of_a_tensor_is_told(master: Master) -> None:
    side = shoal.Stream(NODE)
    x = torch.ones(3, device=NODE)
    with side:
        y, line = x.exp(), here()
    z = y + 1
    for _ in range(2):  # pending, or not, and executed
        told = master.explain(y)
        assert (told.stream, told.operator, told.line, told.age) == (side.stream_id, "aten.exp", line, 0)
        assert f"made by aten.exp on stream {side.stream_id}, 0 operations ago" in str(told)
        assert master.explain(z).stream == 0
        master.synchronize()
    place = master.place([0, 1])
    with (both := shoal.Stream(place.device)):
        w = torch.ones(3, device=place.device).exp()
    assert (master.explain(w).stream, master.explain(w).place) == (both.stream_id, "nodes 0, 1")


def test_an_id_that_another_stream_had_is_explained_by_its_last_maker(master: Master) -> None:
    side = shoal.Stream(NODE)
    had: set[int] = set()
    found = 0
    for _ in range(50):
        first = torch.ones(3, device=NODE).exp()
        with side:
            first.neg()
        had.add(first.handle.id)  # type: ignore[attr-defined]
        del first
        master.synchronize()
        with side:
            second = torch.ones(3, device=NODE).sin()
        second.neg()
        if second.handle.id in had:  # type: ignore[attr-defined]
            found += 1
            assert (master.explain(second).operator, master.explain(second).stream) == (
                "aten.sin",
                side.stream_id,
            )
    assert found


def test_the_widths_of_commands_are_those_of_nodes() -> None:
    memory = SessionState(0)
    reply = BatchReply(0, memory.poisons, SpaceExecutor.run.__code__)
    calls = SpaceExecutor(reply, memory, 0).calls
    assert {number: width for number, (_, width, _) in calls.items()} == WIDTHS
    assert max(WIDTHS) < FIRST


@pytest.mark.usefixtures("no_master")
def test_a_lost_tensor_says_so(start: Callable[..., Program], tmp_path: Path) -> None:
    crew = Crew(start, f"file://{tmp_path}/store", 1)
    with crew.master as master:
        x, line = torch.ones(3, device=NODE), here()
        crew.kill(0)
        told = master.explain(x)
        assert (told.state, told.operator, told.line) == ("lost", "aten.empty.memory_format", line)
        assert isinstance(told.error, shoal.NodeLost)
    crew.end()


def test_what_asks_for_elements_is_not_remembered_for_ever(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_HISTORY_OPERATIONS", 100)
    x = torch.ones(3, device=NODE)
    for _ in range(200):
        x.tolist()  # a batch without an operation
    assert sum(1 for _ in master._nodes[0].streams[0].history.newest_first()) < 100
