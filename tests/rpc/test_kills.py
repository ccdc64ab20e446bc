"""SIGKILL at random moments, in every role: what was pending fails at once, and nothing is left.

``make test`` runs 100 trials, ``make stress`` 1,000 more (100 with ``STRESS=short``).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from shoal.rpc import Peer
from shoal.testing import no_leaks
from tests.rpc import crew as work
from tests.rpc import handlers
from tests.rpc.crew import SURVIVORS, Crew, Pulse, Thing, outcome
from tests.rpc.handlers import PATIENCE

#: seconds from a death until pending calls have failed; on an idle machine it takes milliseconds
PROMISE = 10.0
BATCH = 50

Ended = tuple[str, str, float]


class Trial:
    """One death: its victim, and what became of the calls that were pending."""

    def __init__(self, crew: Crew, number: int) -> None:
        self.crew = crew
        self.choose = random.Random(number)
        self.name = crew.victim()
        self.key = f"trial {number}"
        self.peer: Peer = crew.a.peer(self.name, timeout=PATIENCE)
        self.delays: list[float] = []
        self._died = 0.0

    def reached(self, *names: str) -> None:
        """Wait until these workers have told that they are where the trial wants them."""
        for name in names:
            handlers.wait_for(f"{name} {self.key}")

    def kill(self, longest: float = 0.05) -> None:
        """Kill the victim at some moment."""
        time.sleep(self.choose.uniform(0.0, longest))
        self._died = self.crew.kill_at(self.name)
        self.crew.start_spare()

    def lost(self, ended: Ended, *, may: tuple[str, ...] = ()) -> None:
        """A call has failed because the victim died, in time and with its name; ``may``: or ended so."""
        kind, worker, at = ended
        if kind in may:
            return
        assert (kind, worker) == ("WorkerLost", self.name), ended
        delay = at - self._died
        assert delay < PROMISE, f"noticed after {delay:.3f} s"
        self.delays.append(delay)


def callee(trial: Trial) -> None:
    there = [trial.crew.peers[name].call(work.suffer, trial.name, trial.key) for name in "bc"]
    trial.reached("b", "c")
    echoes = [trial.peer.call(handlers.echo, torch.ones(5_000)) for _ in range(20)]
    futures = [trial.peer.call(handlers.wait_for, "never") for _ in range(5)]
    trial.peer.call(handlers.echo, 1).wait()
    trial.kill()
    for future in futures:
        trial.lost(outcome(future))
    for future in echoes:
        trial.lost(outcome(future), may=("",))
    for each in there:
        for ended in each.wait():
            trial.lost(ended)


def caller(trial: Trial) -> None:
    trial.peer.post(work.call_on_and_on, trial.choose.random())
    trial.kill(0.1)


def owner(trial: Trial) -> None:
    refs = [trial.peer.remote(Thing, number) for number in range(6)]
    told = [trial.crew.peers["bc"[i % 2]].call(work.keep, ref, i) for i, ref in enumerate(refs)]
    actor = trial.peer.actor(Thing, 1)
    assert actor.get().wait() == 1
    for each in told:
        each.wait()
    made = [trial.peer.call(work.own, 1) for _ in range(5)]
    trial.kill(0.01)
    for future in made:
        trial.lost(outcome(future), may=("",))
    trial.crew.outcome(trial.name)
    for ref in refs:
        trial.lost(outcome(ref.rpc_async().get()))
    trial.lost(outcome(actor.get()))
    assert [trial.crew.ask(name, work.use_lost, trial.name) for name in "bc"] == [[], []]


def holder(trial: Trial) -> None:
    trial.peer.post(work.hold_on_and_on, trial.choose.random())
    trial.kill(0.1)


def forwarder(trial: Trial) -> None:
    trial.peer.post(work.forward_on_and_on, trial.choose.random())
    trial.kill(0.1)
    # A survivor can use each object that it was passed.  Exception: the call that makes it may be lost
    # with the victim, since it goes by another connection than the reference.
    for name in SURVIVORS:
        for wrong in trial.crew.ask(name, work.use_kept):
            assert "was never made: the worker that asked for it is lost" in wrong


def receiver(trial: Trial) -> None:
    there = trial.crew.peers["b"].call(work.send_until_lost, trial.name, trial.key)
    trial.reached("b")
    x = torch.ones(work.LARGE)
    futures = [trial.peer.call(work.elements, x) for _ in range(2)]
    trial.kill()
    for future in futures:
        trial.lost(outcome(future), may=("",))
    trial.lost(there.wait())


def sender(trial: Trial) -> None:
    there = trial.crew.peers["b"].call(work.receive_on_and_on, trial.name, trial.key)
    trial.reached("b")
    trial.peer.post(work.send_on_and_on, "c")
    future = trial.peer.call(torch.ones, work.LARGE)
    trial.kill()
    trial.lost(outcome(future), may=("",))
    trial.lost(there.wait())


def barrier(trial: Trial) -> None:
    names = [trial.name, *SURVIVORS]
    there = [trial.crew.peers[name].call(work.come_to_barrier, names) for name in SURVIVORS]
    comes = trial.choose.random() < 0.7
    if comes:
        trial.peer.post(work.come_to_barrier, names)
    trial.kill(0.01)
    for each in there:
        trial.lost(each.wait(), may=("",) if comes else ())


def joining(trial: Trial) -> None:
    crew = trial.crew
    for _ in range(2):  # the name may be claimed by then, or not yet
        crew.kill(trial.name)
        crew.outcome(trial.name)
        crew.start(trial.name, prepare=work.hasten, timeout=PATIENCE)
        time.sleep(trial.choose.uniform(0.0, 0.1))
    crew.kill(trial.name)
    crew.outcome(trial.name)
    pid = crew.start(trial.name, prepare=work.hasten, timeout=PATIENCE)
    assert crew.a.peer(trial.name, timeout=PATIENCE).call(handlers.pid).wait() == pid
    trial.kill(0.0)


def closing(trial: Trial) -> None:
    futures = [trial.peer.call(time.sleep, 0.01 * i) for i in range(5)]
    refs = [trial.peer.remote(Thing, 1)]
    trial.peer.post(work.call_until_closed, 1)
    trial.peer.call(handlers.pid).wait()
    trial.crew.leave(trial.name)
    trial.kill(0.1)
    for future in futures:
        trial.lost(outcome(future), may=("",))
    del refs


ROLES: tuple[Callable[[Trial], None], ...] = (
    callee, caller, owner, holder, forwarder, receiver, sender, barrier, joining, closing,
)  # fmt: skip


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    handlers.noted.clear()
    with Crew():
        pass  # what stays for ever comes with the first one
    with no_leaks(), Crew() as crew:
        for number, role in enumerate(ROLES, -len(ROLES)):
            role(Trial(crew, number))
        yield crew


def run_trials(crew: Crew, numbers: range) -> None:
    before = crew.settle()
    delays: list[float] = []
    with Pulse(crew) as pulse:
        for number in numbers:
            trial = Trial(crew, number)
            role = ROLES[number % len(ROLES)]
            try:
                role(trial)
            except BaseException as error:
                raise AssertionError(f"trial {number}, {role.__name__}") from error
            delays += trial.delays
    assert pulse.wrong == []
    assert pulse.beats
    delays.sort()
    at = [1000 * delays[len(delays) * hundredth // 100] for hundredth in (50, 99)]
    print(
        f"{len(numbers)} deaths, {len(delays)} calls that failed: half within {at[0]:.1f} ms, 99 of 100 "
        f"within {at[1]:.1f} ms, the last after {1000 * delays[-1]:.1f} ms"
    )
    crew.settle(before)


@pytest.mark.parametrize("first", range(0, 100, BATCH))
def test_a_death_fails_what_was_pending_and_leaves_nothing(crew: Crew, first: int) -> None:
    run_trials(crew, range(first, first + BATCH))


@pytest.mark.stress
@pytest.mark.parametrize("first", range(100, 200 if os.environ.get("STRESS") == "short" else 1100, 100))
def test_many_deaths_fail_what_was_pending_and_leave_nothing(crew: Crew, first: int) -> None:
    run_trials(crew, range(first, first + 100))
