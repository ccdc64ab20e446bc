"""Processes join a session that runs: real ones, which receive the state from those that hold it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from shoal import PeerLost, ProcessGroup, StateDiverged
from shoal.elastic import Samples, Session, State, Step, session
from shoal.elastic.membership import admission
from shoal.elastic.membership.candidates import CandidateRegistry
from shoal.elastic.membership.members import SessionMembers
from shoal.testing import Outcome, no_leaks, processes

from .training import STEPS, Log, assert_as_undisturbed, train

PATIENCE = 60.0
#: newcomers have half of that for connecting
PATIENT = {"SHOAL_VOTE_TIMEOUT": "60"}
JOIN_AT = 5
LONGER = 40


def await_newcomers(step: Step, count: int) -> None:
    """On rank 0: wait until so many processes wait to join."""
    until = time.monotonic() + PATIENCE
    session = step._session
    assert isinstance(session, Session)
    while session.waiting < count and time.monotonic() < until:
        time.sleep(0.005)


def training(group: ProcessGroup | None, newcomers: int, at: int = JOIN_AT, **how: Any) -> Log:
    """Train; rank 0 waits before the step ``at`` until so many newcomers are there."""

    def visit(point: str, step: Step) -> None:
        if group is not None and (step.number, point) == (at, "between") and step._session.group.rank == 0:
            group.store.set("asks", b"")
            await_newcomers(step, newcomers)

    return train(group, visit, **how)


def logs_of(outcomes: list[Outcome]) -> list[Log]:
    assert all(each.ok for each in outcomes), "\n".join(each.describe() for each in outcomes)
    return [each.value for each in outcomes]


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"hosts": "aab"}], ids=["shm", "tcp", "mixed"])
def test_newcomers_receive_the_state_and_train_on(options: dict[str, Any]) -> None:
    with no_leaks(), processes(training, 3, 2, timeout=PATIENCE, env=PATIENT, **options) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        for _ in range(2):
            ranks.newcomer(training, None, 0)
        logs = logs_of(ranks.join())
    assert_as_undisturbed(logs)
    for log in logs[:3]:
        (event,) = log.events
        assert (event.step, event.joined, event.size, event.previous_size) == (JOIN_AT + 1, (3, 4), 5, 3)
        assert not event.again
    for log in logs[3:]:
        assert len(log.steps) == STEPS - JOIN_AT - 1
        assert log.events == []


#: what a process does next, or has just done, when it dies
POINTS: dict[str, tuple[Any, str, bool]] = {
    "inviting": (CandidateRegistry, "invite", False),
    "invited": (CandidateRegistry, "invite", True),
    "meeting": (admission, "_connect", False),
    "connected": (admission, "_connect", True),
    "taken": (SessionMembers, "_take", True),
    "sending": (session, "send_state", False),
    "sent": (session, "send_state", True),
    "receiving": (session, "receive_state", False),
    "received": (session, "receive_state", True),
}


def die_at(point: str) -> None:
    """Be killed there."""
    owner, name, after = POINTS[point]
    whole = getattr(owner, name)

    def dying(*args: Any, **how: Any) -> Any:
        if after:
            whole(*args, **how)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def dying(group: ProcessGroup | None, newcomers: int, point: str, victim: int) -> Log:
    """Train; a rank of the first group, or this newcomer (-1), dies at a point of the admission."""
    if victim == (-1 if group is None else group.rank):
        die_at(point)
    return training(group, newcomers)


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("inviting", 0),
        ("invited", 0),
        ("meeting", 1),
        ("connected", 2),
        ("taken", 0),
        ("sending", 1),
        ("sent", 2),
    ],
)
def test_a_rank_dies_while_others_join(point: str, victim: int) -> None:
    with no_leaks(), processes(dying, 3, 1, point, victim, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(dying, None, 0, point, 0)
        outcomes = ranks.join()
    assert outcomes.pop(victim).describe() == f"rank {victim} was ended by SIGKILL"
    *others, newcomer = outcomes
    assert_as_undisturbed(logs_of([*others, newcomer] if newcomer.ok else others))
    if not newcomer.ok:  # it was invited, and then nobody trained any more
        assert "SystemExit: 0" in newcomer.describe()


@pytest.mark.parametrize("point", ["meeting", "connected", "taken", "receiving", "received"])
def test_a_newcomer_dies_while_it_joins(point: str) -> None:
    with no_leaks(), processes(dying, 3, 2, point, -2, timeout=PATIENCE, env=PATIENT) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(dying, None, 0, point, -1)
        ranks.newcomer(dying, None, 0, point, -2)
        outcomes = ranks.join()
    assert outcomes.pop(3).describe() == "rank 3 was ended by SIGKILL"
    *others, newcomer = outcomes
    assert_as_undisturbed(logs_of([*others, newcomer] if newcomer.ok else others))
    if not newcomer.ok:
        assert "SystemExit: 0" in newcomer.describe()


def giving_up(group: ProcessGroup | None) -> Log:
    """Train; the newcomer gives up once when it is connected, and the others may have gone over."""
    connect, tries = admission._connect, []

    def failing(meeting: Any, *args: Any) -> Any:
        found = connect(meeting, *args)
        tries.append(found)
        if len(tries) == 1:
            found[0].world.close(1.0)
            raise PeerLost("nothing is lost", [0])
        return found

    if group is None:
        admission._connect = failing  # type: ignore[method-assign]
    return training(group, 1, until=LONGER)


def test_a_newcomer_that_gives_up_late_is_gone_without_and_comes_again() -> None:
    with no_leaks(), processes(giving_up, 3, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(giving_up, None)
        *others, newcomer = ranks.join()
    logs = logs_of([*others, newcomer] if newcomer.ok else others)
    assert_as_undisturbed(logs, until=LONGER)
    assert logs[0].events[0].joined == (3,)
    assert logs[0].events[1].lost == (3,)


def busy(group: ProcessGroup | None, leaves: bool) -> Log:
    """Train; after a commit, in which a newcomer waits or rank 0 leaves, rank 1 does something of its own."""

    def visit(point: str, step: Step) -> None:
        if group is None or step.number != JOIN_AT or step._session.group.size != 3:
            return
        session = step._session
        assert isinstance(session, Session)
        if point == "between" and group.rank == 0:
            group.store.set("asks", b"")
            if leaves:
                session.leave()
            else:
                await_newcomers(step, 1)
        if point == "after commit" and group.rank == 1:
            time.sleep(2.5)

    return train(group, visit)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_is_busy_is_waited_for(leaves: bool) -> None:
    hurried = {"SHOAL_VOTE_TIMEOUT": "0.5"}
    with no_leaks(), processes(busy, 3, leaves, timeout=PATIENCE, env=hurried) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        if not leaves:
            ranks.newcomer(busy, None, leaves)
        outcomes = ranks.join()
    logs = logs_of(outcomes)
    assert all(event.lost == () for log in logs for event in log.events)
    if leaves:
        assert [event.left for event in logs[1].events] == [(0,)]
    else:
        assert_as_undisturbed(logs)
        assert logs[0].events[0].joined == (3,)


def with_a_spare(group: ProcessGroup | None) -> Log:
    """Train with three ranks at most; rank 1 dies while a fourth process waits."""

    def visit(point: str, step: Step) -> None:
        if group is not None and (step.number, point) == (JOIN_AT, "between") and group.rank == 0:
            group.store.set("asks", b"")
            await_newcomers(step, 1)
        if group is not None and (step.number, point) == (JOIN_AT + 2, "before commit") and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(group, visit, max=3)


def test_a_spare_waits_until_a_rank_has_died() -> None:
    with no_leaks(), processes(with_a_spare, 3, timeout=PATIENCE, env=PATIENT) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(with_a_spare, None)
        first, dead, last, spare = ranks.join()
    assert dead.describe() == "rank 1 was ended by SIGKILL"
    logs = logs_of([first, last, spare])
    assert_as_undisturbed(logs)
    assert [(event.size, event.lost, event.joined) for event in logs[0].events] == [
        (2, (1,), ()),
        (3, (), (2,)),
    ]
    assert logs[2].steps[0].number > JOIN_AT + 2


def keep_one_waiting(group: ProcessGroup | None) -> str:
    """Train with two ranks at most, while a third process waits."""

    def visit(point: str, step: Step) -> None:
        if point == "between" and step.number == 1 and step._session.group.rank == 0:
            assert group is not None
            group.store.set("asks", b"")
            await_newcomers(step, 1)

    if group is None:
        with pytest.raises(SystemExit) as caught:
            train(None, max=2)
        return f"ended with {caught.value.code}"
    assert train(group, visit, max=2).events == []
    return ""


def test_who_waits_when_the_session_ends_ends_too() -> None:
    with no_leaks(), processes(keep_one_waiting, 2, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(keep_one_waiting, None)
        outcomes = ranks.join()
    assert all(each.ok for each in outcomes), [each.describe() for each in outcomes]
    assert outcomes[2].value == "ended with 0"


def with_another_state(group: ProcessGroup | None) -> Any:
    if group is not None:
        return training(group, 1)
    state = State(
        model=nn.Linear(6, 1), optimizer=None, scheduler=None, samples=Samples(50, batch=12), best=0.0
    )
    with pytest.raises(StateDiverged) as caught, Session(state) as mine:
        next(mine.steps())
    return str(caught.value)


def test_a_newcomer_with_another_state_is_refused_and_the_others_go_on() -> None:
    with no_leaks(), processes(with_another_state, 2, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(with_another_state, None)
        *others, newcomer = ranks.join()
    assert newcomer.ok, newcomer.describe()
    assert "rank 2 joined with another State than that of the others" in newcomer.value
    assert_as_undisturbed(logs_of(others))


def test_a_process_that_finds_no_session_says_so() -> None:
    with no_leaks(), processes(stay, 1, timeout=PATIENCE) as ranks:
        ranks.newcomer(train, None, SHOAL_TIMEOUT="2")
        ranks.store.set("enough", b"")
        _, newcomer = ranks.join()
    assert not newcomer.ok
    assert (
        "within 2 s no session began here that this process (SHOAL_JOIN=1) could join" in newcomer.describe()
    )


def stay(group: ProcessGroup) -> None:
    group.store.wait(["enough"], PATIENCE)


def everything(group: ProcessGroup | None) -> list[str]:
    """Train a model that holds what a state may hold; the digests after each step."""
    torch.manual_seed(0 if group is not None else 1)  # a newcomer begins with other parameters
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))
    net = net.to(memory_format=torch.channels_last)
    net.register_buffer("none_in_bytes", torch.empty(0))
    net.register_buffer("large", torch.zeros(3 << 20))
    optimizer = torch.optim.Adam(net.parameters(), amsgrad=True)
    tree: dict[str, Any] = {"mean": torch.zeros(2)}
    tree["children"] = [{"mean": tree["mean"] + 1}]
    state = State(
        model=net, optimizer=optimizer, samples=Samples(40, batch=8), best=[0, "x", None], tree=tree
    )
    x = torch.randn(40, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    seen = []
    with Session(state, group=group) as mine:
        model = mine.parallel(net)
        for step in mine.steps(until=12):
            if step.number == 4 and group is not None and group.rank == 0:
                group.store.set("asks", b"")
                await_newcomers(step, 1)
            with step:
                net.large.add_(1.0)
                (model(x[step.indices]).square().mean() * step.weight).backward()
                step.commit()
                optimizer.step()
                optimizer.zero_grad()
                state.best = [step.number, "x", None]
                buffers = [each.sum().item() for name, each in net.named_buffers() if "running" not in name]
                (child,) = state.tree["children"]
                state.tree["mean"] += 1
                child["mean"] += state.tree["mean"]
                seen.append(f"{state.digest().hex()} {state.best} {buffers} {child['mean'].tolist()}")
    return seen


def test_all_that_a_state_may_hold_arrives() -> None:
    with no_leaks(), processes(everything, 2, timeout=PATIENCE, env=PATIENT) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(everything, None)
        outcomes = ranks.join()
    first, other, joined = logs_of(outcomes)
    assert first == other
    assert joined == first[-len(joined) :]
    assert len(joined) == 7
