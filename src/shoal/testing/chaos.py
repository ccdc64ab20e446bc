"""Chaos: a program runs on several ranks again and again, and each time some are killed or stopped.

    from shoal.testing import chaos

    def test_training_goes_on():
        trials = chaos.trials(train, 4, count=50, kinds=("kill", "stop"), most=2)
        assert not [trial for trial in trials if trial.bad]

What is done to whom, and when, follows from the seed of the trial; what the program makes of it does not, so
a race may need several tries.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import UsageError
from ..group import ProcessGroup
from ..wording import ranks_named
from .leaks import no_leaks
from .outcome import Outcome
from .processes import Ranks

Kind: TypeAlias = Literal["kill", "stop"]

#: seconds after which a stopped rank goes on: longer than the others need to give it up
STANDSTILL = 3.0
_KINDS = ("kill", "stop")


@dataclass(frozen=True, slots=True)
class Harm:
    """What is done to a rank.

    Attributes:
        kind: ``"kill"`` (SIGKILL), or ``"stop"`` (SIGSTOP, and SIGCONT after 3 s).
        after: seconds from the moment at which all ranks are ready.
    """

    rank: int
    kind: Kind
    after: float


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one trial.

    Attributes:
        harms: what was done, in the order of time.
        lost: the ranks that did not return; who came to its end before its turn is not met by a harm.
        seconds: from the moment at which all ranks were ready to the end of the last one.
        bad: what was wrong, in words; empty: nothing.
    """

    seed: int
    ranks: int
    harms: tuple[Harm, ...]
    lost: tuple[int, ...]
    seconds: float
    bad: str


def plan(
    seed: int,
    ranks: int,
    kinds: Sequence[Kind] = ("kill",),
    most: int = 1,
    within: float = 1.0,
    apart: float = 1.0,
) -> tuple[Harm, ...]:
    """What is done in the trial of ``seed``: see :func:`trials`."""
    if not kinds or any(kind not in _KINDS for kind in kinds):
        raise UsageError(f"chaos: kinds={tuple(kinds)!r}: expected some of {', '.join(_KINDS)}")
    if not 1 <= most < ranks:
        raise UsageError(
            f"chaos: most={most!r}: expected 1 to {ranks - 1}, so that one of {ranks} ranks is left"
        )
    choose = random.Random(seed)
    victims = choose.sample(range(ranks), choose.randint(1, most))
    after, harms = choose.uniform(0.0, within), []
    for rank in victims:
        harms.append(Harm(rank, choose.choice(list(kinds)), after))
        after += choose.uniform(0.0, apart)
    return tuple(harms)


def play(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    harms: Sequence[Harm],
    seed: int = 0,
    ready: bool = False,
    timeout: float = 60.0,
    **how: Any,
) -> Trial:
    """One trial, in which ``harms`` are done; for the other arguments see :func:`trials`."""
    began = time.monotonic()
    lost: tuple[int, ...] = ()
    try:
        with no_leaks(), Ranks(_run, ranks, fn, args, not ready, timeout=timeout, **how) as running:
            running.store.wait([_ready(rank) for rank in range(ranks)], timeout)
            began = time.monotonic()
            doing = [_Doing(running.pids[harm.rank], harm) for harm in harms]
            try:
                outcomes = running.join()
            finally:
                seconds = time.monotonic() - began
                for each in doing:
                    each.end()
        lost = tuple(each.rank for each in outcomes if not each.ok)
        bad = _verdict(outcomes, {harm.rank for harm in harms})
    except AssertionError as error:  # of no_leaks
        seconds, bad = time.monotonic() - began, str(error)
    return Trial(seed, ranks, tuple(sorted(harms, key=lambda harm: harm.after)), lost, seconds, bad)


def trials(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    count: int,
    seed: int = 0,
    kinds: Sequence[Kind] = ("kill",),
    most: int = 1,
    within: float = 1.0,
    apart: float = 1.0,
    ready: bool = False,
    record: str | os.PathLike[str] | None = None,
    **how: Any,
) -> list[Trial]:
    """Run ``fn(group, *args)`` on processes ``count`` times, each time with some ranks killed or stopped.

    A trial is bad if a rank to which nothing was done does not return in time; if ranks return values that
    differ (return a digest of what has to be equal); or if threads, descriptors, shared memory or processes
    are left behind.  A rank to which something was done may die, raise, or return what the others do.

    Args:
        fn: at the top level of a module, as for :func:`~shoal.testing.processes`.
        ranks: how many.
        count: of trials.
        seed: of the first; the next ones follow.
        kinds: what is done: ``"kill"``, ``"stop"``.
        most: to so many ranks, at most; to one at least.
        within: seconds in which the first of them is met, from the moment at which all ranks are ready.
        apart: seconds between two of them, at most.
        ready: the program calls :func:`ready` where its ranks may be harmed; False: as soon as they have met.
        record: a file to which each trial is added as a line of JSON.
        how: as for :class:`~shoal.testing.Ranks`, such as ``timeout=`` (60 s a trial) or ``hosts=``.

    Returns:
        The trials; :func:`play` with the ``harms`` of one repeats it.

    Raises:
        UsageError: an argument makes no sense.
    """
    done = []
    for number in range(seed, seed + count):
        harms = plan(number, ranks, kinds, most, within, apart)
        trial = play(fn, ranks, *args, harms=harms, seed=number, ready=ready, **how)
        done.append(trial)
        if record is not None:
            with Path(record).open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
    return done


def _ready(rank: int) -> str:
    return f"chaos/ready/{rank}"


def ready(group: ProcessGroup) -> None:
    """Tell that from now on this rank may be killed or stopped; see ``ready=`` of :func:`trials`."""
    group.store.set(_ready(group.rank), b"")


def _run(group: ProcessGroup, fn: Callable[..., Any], args: tuple[Any, ...], is_ready: bool) -> Any:
    """On each rank."""
    if is_ready:
        ready(group)
    return fn(group, *args)


class _Doing(threading.Thread):
    """Does one harm to a process, at its time from now on."""

    def __init__(self, pid: int, harm: Harm) -> None:
        super().__init__(name="shoal-chaos", daemon=True)
        self._process, self._harm = os.pidfd_open(pid), harm
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            if not self._over.wait(self._harm.after):
                stop = self._harm.kind == "stop"
                signal.pidfd_send_signal(self._process, signal.SIGSTOP if stop else signal.SIGKILL)
                if stop:
                    self._over.wait(STANDSTILL)
                    signal.pidfd_send_signal(self._process, signal.SIGCONT)
        os.close(self._process)

    def end(self) -> None:
        """Do it no more, and undo what can be undone."""
        self._over.set()
        self.join()


def _verdict(outcomes: Sequence[Outcome], harmed: set[int]) -> str:
    """What is wrong with these outcomes, in words."""
    wrong = [each.describe() for each in outcomes if not each.ok and each.rank not in harmed]
    wrong += [each.describe() for each in outcomes if each.rank in harmed and each.stacks is not None]
    values: list[tuple[Any, list[int]]] = []
    for each in outcomes:
        if not each.ok:
            continue
        for value, ranks in values:
            if value == each.value:
                ranks.append(each.rank)
                break
        else:
            values.append((each.value, [each.rank]))
    if len(values) > 1:
        wrong.append("; ".join(f"{ranks_named(ranks)} returned {value!r}" for value, ranks in values))
    return "\n".join(wrong)
