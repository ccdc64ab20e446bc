"""Chaos tests: run a program on several ranks many times, with faults injected into some of them.

    from shoal.testing import chaos

    def test_training_goes_on():
        trials = chaos.trials(train, 4, count=50, kinds=("kill", "stop"), most=2)
        assert not [trial for trial in trials if trial.bad]

The seed of a trial determines the faults and their times, but not how the program reacts, so a race may need
several trials to show.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..common.formatting import ranks_named
from ..errors import UsageError
from ..group import ProcessGroup
from .leaks import no_leaks
from .outcome import Outcome
from .processes import Ranks

Kind: TypeAlias = Literal["kill", "stop", "leave", "join", "store"]

#: seconds until a stopped rank is resumed; long enough for the others to evict it
STOP_DURATION_S = 3.0
#: seconds until a killed store is served again
STORE_DOWNTIME_S = 1.0
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
_KINDS = (*_SIGNALS, "join", "store")
#: rank of a fault that concerns no rank
NO_RANK = -1


@dataclass(frozen=True, slots=True)
class Harm:
    """A fault.

    Attributes:
        rank: the rank; newcomers are numbered after the first ranks.
        kind: ``"kill"`` (SIGKILL), ``"stop"`` (SIGSTOP, and SIGCONT after 3 s), ``"leave"`` (SIGTERM),
            ``"join"`` (a process is started and joins the others' session), or ``"store"`` (the store is
            killed, and served again after 1 s without its contents; concerns no rank).
        after: seconds since all ranks were ready.
    """

    rank: int
    kind: Kind
    after: float


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one trial.

    Attributes:
        harms: the faults injected, in order of time, without those for ranks that had already ended.
        lost: the ranks that did not return.
        seconds: time from the moment all ranks were ready until the last one ended.
        bad: description of the errors; empty if there were none.
        gone_on: for each fault, the seconds until the survivors' first operation in their new group, on the
            slowest rank; requires :func:`mark`. None if there was none, or if processes joined in this trial.
        joined: newcomers that joined and returned.
        joined_after: for each newcomer, the seconds from its start (or the return of the store, if later)
            until its first operation with the others completed. None if there was none.
    """

    seed: int
    ranks: int
    harms: tuple[Harm, ...]
    lost: tuple[int, ...]
    seconds: float
    bad: str
    gone_on: tuple[float | None, ...] = ()
    joined: tuple[int, ...] = ()
    joined_after: tuple[float | None, ...] = ()


def plan(
    seed: int,
    ranks: int,
    kinds: Sequence[Kind] = ("kill",),
    most: int = 1,
    within: float = 1.0,
    apart: float = 1.0,
    least: int = 1,
) -> tuple[Harm, ...]:
    """The faults of trial `seed`; see :func:`trials`."""
    if not kinds or any(kind not in _KINDS for kind in kinds):
        raise UsageError(f"chaos: kinds={tuple(kinds)!r}: expected some of {', '.join(_KINDS)}")
    if not most >= 1 or (most >= ranks and "join" not in kinds):
        raise UsageError(
            f"chaos: most={most!r}: expected 1 to {ranks - 1}, so that one of {ranks} ranks survives"
        )
    if not 1 <= least <= most:
        raise UsageError(f"chaos: least={least!r}: expected 1 to most={most}")
    choose = random.Random(seed)
    spared = choose.randrange(ranks)
    here, count = [rank for rank in range(ranks) if rank != spared], ranks
    after, harms = choose.uniform(0.0, within), []
    for _ in range(choose.randint(least, most)):
        kind = choose.choice(list(kinds)) if here else "join"
        if kind == "store":
            harms.append(Harm(NO_RANK, kind, after))
        elif kind == "join":
            harms.append(Harm(count, kind, after))
            here.append(count)
            count += 1
        else:
            harms.append(Harm(here.pop(choose.randrange(len(here))), kind, after))
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
    join_within: float | None = None,
    **how: Any,
) -> Trial:
    """Run one trial with these faults; for the other arguments see :func:`trials`."""
    began = time.monotonic()
    work = _Work(fn, args, tuple(harms), not ready)
    done: dict[Harm, float] = {}
    how.setdefault("mortal_store", any(harm.kind == "store" for harm in harms))
    try:
        with no_leaks(), Ranks(work, ranks, timeout=timeout, **how) as running:
            running.store.wait([_ready(rank) for rank in range(ranks)], timeout)
            began = time.monotonic()
            try:
                done, back = _inject(running, work)
                outcomes = running.join()
            finally:
                seconds = time.monotonic() - began
    except AssertionError as error:  # raised by no_leaks
        return Trial(seed, ranks, tuple(done), (), time.monotonic() - began, str(error))
    lost = tuple(each.rank for each in outcomes if not each.ok)
    bad = _verdict(outcomes, done)
    if join_within is not None:
        bad = "\n".join(filter(None, [bad, *_late(outcomes, done, back, join_within)]))
    joined = tuple(each.rank for each in outcomes[ranks:] if each.ok and each.value.returned)
    return Trial(
        seed, ranks, tuple(done), lost, seconds, bad, _gone_on(outcomes, done), joined,
        _joined_after(outcomes, done, back),
    )  # fmt: skip


def trials(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    count: int,
    seed: int = 0,
    kinds: Sequence[Kind] = ("kill",),
    most: int = 1,
    least: int = 1,
    within: float = 1.0,
    apart: float = 1.0,
    ready: bool = False,
    record: str | os.PathLike[str] | None = None,
    **how: Any,
) -> list[Trial]:
    """Run ``fn(group, *args)`` on processes ``count`` times, each time with faults in some ranks.

    A trial is bad if an unharmed rank does not return in time; if ranks return different values (return a
    digest of the state that must be equal); or if threads, descriptors, shared memory or processes leak. A
    killed or stopped rank may die, raise, or return the same value. A rank told to leave by SIGTERM must
    return, with any value, or die by SIGTERM. A newcomer calls ``fn(None, *args)`` and may raise
    ``SystemExit(0)``, as a session does that ends without it.

    Args:
        fn: a function at the top level of a module, as for :func:`~shoal.testing.processes`.
        ranks: number of ranks.
        count: number of trials.
        seed: seed of the first trial; the next trials use the following integers.
        kinds: kinds of faults: ``"kill"``, ``"stop"``, ``"leave"``, ``"join"``, ``"store"``; ``"leave"`` and
            ``"join"`` require sessions of :mod:`shoal.elastic`.
        most, least: maximum and minimum number of faults per trial; fewer than ``ranks`` unless ``"join"`` is
            one of the kinds.
        within: latest time of the first fault, in seconds after all ranks are ready.
        apart: maximum number of seconds between two faults.
        ready: whether the program calls :func:`ready` when its ranks may be harmed; if False, they are ready
            when they have met.
        record: file to which each trial is appended as a line of JSON.
        how: ``join_within``, the seconds within which an unharmed newcomer must have joined (otherwise the
            trial is bad); other options as for :class:`~shoal.testing.Ranks`, such as ``timeout=`` (60 s per
            trial) or ``hosts=``.

    Returns:
        The trials; pass the ``harms`` of a trial to :func:`play` to repeat it.

    Raises:
        UsageError: an argument is invalid.
    """
    done = []
    with _quick_collections():
        for number in range(seed, seed + count):
            harms = plan(number, ranks, kinds, most, within, apart, least)
            trial = play(fn, ranks, *args, harms=harms, seed=number, ready=ready, **how)
            done.append(trial)
            if record is not None:
                with Path(record).open("a") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
    return done


# -- called by programs ------------------------------------------------------------------------------


def _ready(rank: int) -> str:
    return f"chaos/ready/{rank}"


def ready(group: ProcessGroup) -> None:
    """Report that this rank may be harmed from now on; see ``ready=`` of :func:`trials`."""
    group.store.set(_ready(group.rank), b"")


_planned: tuple[Harm, ...] = ()


def planned() -> tuple[Harm, ...]:
    """The planned faults of this trial, on each rank; a program may end soon after the last one."""
    return _planned


#: by epoch: the members of the group, and the time of the first marked operation
_marks: dict[int, tuple[tuple[int, ...], float]] = {}


def mark(group: ProcessGroup) -> None:
    """Report that an operation of ``group`` has just completed, for :attr:`Trial.gone_on`.

    Cheap enough to call after every operation.

    Raises:
        AssertionError: an operation of a later group has already completed.
    """
    epoch = group.epoch
    if epoch not in _marks:
        if _marks and epoch < max(_marks):
            raise AssertionError(f"an operation completed in epoch {epoch} after one in epoch {max(_marks)}")
        _marks[epoch] = (group._spec.ranks, time.monotonic())


# -- on each rank -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RankReport:
    value: Any
    marks: dict[int, tuple[tuple[int, ...], float]] = field(repr=False)
    returned: bool = True


@dataclass(frozen=True)
class _Work:
    """The function of each rank; called with the group, or with None on newcomers."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    harms: tuple[Harm, ...]
    is_ready: bool

    def __call__(self, group: ProcessGroup | None) -> _RankReport:
        global _planned
        _planned = self.harms
        if self.is_ready and group is not None:
            ready(group)
        try:
            return _RankReport(self.fn(group, *self.args), _marks)
        except SystemExit as end:
            if end.code or group is not None:
                raise
            return _RankReport(None, _marks, returned=False)


# -- injection and verdict ----------------------------------------------------------------------------


def _inject(running: Ranks, work: _Work) -> tuple[dict[Harm, float], list[float]]:
    """Inject faults until all ranks have ended; return the times of the faults and of the store's returns."""
    began = time.monotonic()
    done: dict[Harm, float] = {}
    back: list[float] = []
    with contextlib.ExitStack() as descriptors:

        def hold(pid: int) -> int:
            descriptor = os.pidfd_open(pid)
            descriptors.callback(os.close, descriptor)
            return descriptor

        processes = dict(enumerate(map(hold, running.pids)))
        events: list[tuple[float, Harm, signal.Signals | None]] = []
        for harm in work.harms:
            events.append((harm.after, harm, _SIGNALS.get(harm.kind)))
            if harm.kind == "stop":
                events.append((harm.after + STOP_DURATION_S, harm, signal.SIGCONT))
            elif harm.kind == "store":
                events.append((harm.after + STORE_DOWNTIME_S, harm, None))
        for after, harm, number in sorted(events, key=lambda event: event[0]):
            if running.ended(max(began + after - time.monotonic(), 0.0)):
                break
            now = time.monotonic()
            if harm.kind == "store":
                if harm in done:
                    running.restore_store()
                    back.append(time.monotonic())
                else:
                    running.kill_store()
            elif number is None:
                processes[harm.rank] = hold(running.pids[running.newcomer(work, None)])
            elif harm.rank in processes:
                try:
                    signal.pidfd_send_signal(processes[harm.rank], number)
                except ProcessLookupError:  # the rank has ended
                    continue
            done.setdefault(harm, now)
    return done, back


def _verdict(outcomes: Sequence[Outcome], done: dict[Harm, float]) -> str:
    kinds = {harm.rank: harm.kind for harm in done if harm.kind != "join"}
    wrong = []
    for each in outcomes:
        may_fail = kinds.get(each.rank) in ("kill", "stop") or (
            kinds.get(each.rank) == "leave" and each.exitcode == -signal.SIGTERM
        )
        if each.stacks is not None or not (each.ok or may_fail):
            wrong.append(each.describe())
    said = [each for each in outcomes if each.ok]
    values: list[tuple[Any, list[int]]] = []
    for each in said:
        if not each.value.returned or kinds.get(each.rank) == "leave":
            continue
        for value, ranks in values:
            if value == each.value.value:
                ranks.append(each.rank)
                break
        else:
            values.append((each.value.value, [each.rank]))
    if len(values) > 1:
        wrong.append("; ".join(f"{ranks_named(ranks)} returned {value!r}" for value, ranks in values))
    for epoch in sorted({epoch for each in said for epoch in each.value.marks}):
        groups = {each.value.marks[epoch][0] for each in said if epoch in each.value.marks}
        if len(groups) > 1:
            wrong.append(f"two groups in epoch {epoch}: {sorted(groups)}")
    return "\n".join(wrong)


def _gone_on(outcomes: Sequence[Outcome], done: dict[Harm, float]) -> tuple[float | None, ...]:
    marks = [each.value.marks for each in outcomes if each.ok]
    found: list[float | None] = []
    for harm, at in done.items():
        epochs = {epoch for each in marks for epoch, (members, _) in each.items() if harm.rank not in members}
        moments = [each[min(epochs)][1] for each in marks if min(epochs) in each] if epochs else []
        found.append(max(moments) - at if moments else None)
    if any(harm.kind == "join" for harm in done):
        found = [None] * len(found)  # members are renumbered when processes join
    return tuple(None if harm.kind == "store" else each for harm, each in zip(done, found, strict=True))


def _joined_after(
    outcomes: Sequence[Outcome], done: dict[Harm, float], back: Sequence[float]
) -> tuple[float | None, ...]:
    found: list[float | None] = []
    for harm, at in done.items():
        if harm.kind == "join":
            each = outcomes[harm.rank]
            marks = [moment for _, moment in each.value.marks.values()] if each.ok else []
            since = max([at, *(moment for moment in back if not marks or moment < min(marks))])
            found.append(min(marks) - since if marks else None)
    return tuple(found)


def _late(
    outcomes: Sequence[Outcome], done: dict[Harm, float], back: Sequence[float], within: float
) -> list[str]:
    """Describe the unharmed newcomers that joined too late."""
    wrong = []
    harmed = {harm.rank for harm in done if harm.kind != "join"}
    newcomers = [(harm.rank, at) for harm, at in done.items() if harm.kind == "join"]
    took = _joined_after(outcomes, done, back)
    for (rank, at), seconds in zip(newcomers, took, strict=True):
        waited = seconds if seconds is not None else outcomes[rank].at - max([at, *back])
        if rank not in harmed and waited > within:
            joined = "joined" if seconds is not None else "had not joined"
            wrong.append(f"newcomer {rank} {joined} after {waited:.1f} s")
    return wrong


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Exclude existing objects from the garbage collections of the trials."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
