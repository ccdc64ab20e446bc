"""The measurement loop: contenders take turns, size by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from .case import Case
from .contender_process import ContenderProcesses, MeasurementFailed
from .contenders import Contender, ContenderUnavailable, Variant
from .result import BenchResult

#: target duration of a sample; including untimed parts it is at most _MAX_OVERHEAD_RATIO times as long
SAMPLE_SECONDS = 0.015
_MAX_OVERHEAD_RATIO = 3
_MAX_REPEAT = 5000


#: of a small benchmark: a list per round, with the answer of each rank
Answers = list[list[dict[str, Any]]]


@dataclass
class ContenderVariant:
    """A variant of a running contender; `repeat` is 0 while there are no buffers."""

    running: ContenderProcesses
    variant: Variant
    repeat: int = 0

    def prepare(self, case: Case) -> float:
        """Create and check the buffers, set `repeat`; return the largest relative error."""
        answers = self.running.ask(
            "prepare", variant=self.variant.kind, operation=case.operation, dtype=case.dtype,
            nbytes=case.size.nbytes, offset=case.size.offset,
        )  # fmt: skip
        self.repeat = 1
        for _ in range(3):
            seconds, every = self._ask()
            self.repeat = max(
                1, min(_MAX_REPEAT, round(SAMPLE_SECONDS / max(seconds, every / _MAX_OVERHEAD_RATIO, 1e-9)))
            )
        return max(float(answer["error"]) for answer in answers)

    def sample(self) -> float:
        """Return the seconds per operation on the slowest rank."""
        return self._ask()[0]

    def _ask(self) -> tuple[float, float]:
        answers = self.running.ask("sample", variant=self.variant.kind, repeat=self.repeat)
        return max(answer["seconds"] for answer in answers), max(answer["every"] for answer in answers)


class Race:
    """The contenders with one number of ranks; a context manager that ends their processes."""

    def __init__(
        self, contenders: Sequence[Contender], ranks: int, result: BenchResult, say: Callable[[str], None]
    ) -> None:
        self._ranks, self._result, self._say = ranks, result, say
        self._contenders = contenders
        self._running: list[ContenderProcesses] = []
        self._said: set[tuple[str, str]] = set()

    def __enter__(self) -> Race:
        try:
            for contender in self._contenders:
                try:
                    running = ContenderProcesses(contender, self._ranks)
                except ContenderUnavailable as reason:
                    self._report_unavailable(contender.name, "", str(reason))
                else:
                    self._running.append(running)
                    self._result.versions[contender.name] = running.version
        except BaseException:
            self._stop(kill=True)
            raise
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self._stop(kill=kind is not None)

    def _stop(self, *, kill: bool) -> None:
        for running in self._running:
            running.stop(kill=kill)
        self._running.clear()

    def measure(self, case: Case, rounds: int) -> None:
        """Take ``rounds`` samples of every variant, in rotating order."""
        racing = [
            ContenderVariant(running, variant)
            for running in self._running
            for variant in running.contender.variants
            if variant.takes(case)
        ]
        release_each_turn = (
            case.memory(self._ranks) * (len(racing) + 1) > psutil.virtual_memory().available / 2
        )
        for turn in range(rounds):
            shift = turn % max(len(racing), 1)
            for entry in racing[shift:] + racing[:shift]:
                if not self._turn(entry, case, release_each_turn=release_each_turn):
                    racing.remove(entry)
        self._release()

    def _turn(self, entry: ContenderVariant, case: Case, *, release_each_turn: bool) -> bool:
        running = entry.running
        if running not in self._running:
            return False
        cell = self._result.cell(case, self._ranks, entry.variant.name)
        try:
            if not entry.repeat:
                cell.error = max(cell.error, entry.prepare(case))
            cell.samples.append(entry.sample())
            if release_each_turn:
                running.ask("release")
                entry.repeat = 0
        except MeasurementFailed as reason:
            self._report_unavailable(running.contender.name, str(case), str(reason))
            if reason.wrong:
                cell.samples.clear()
            return False
        except ContenderUnavailable as reason:
            self._remove(running, str(case), str(reason))
            return False
        return True

    def _release(self) -> None:
        for running in list(self._running):
            try:
                running.ask("release")
            except (ContenderUnavailable, MeasurementFailed) as reason:
                self._remove(running, "", str(reason))

    def futex(self, rounds: int) -> None:
        """Measure the round trip of two processes that wake each other."""
        for running in self._running:
            if running.contender.engine != "floor":
                continue
            try:
                for _ in range(rounds):
                    answers = running.ask("micro", name="futex", repeat=500)
                    self._result.futex.append(max(answer["seconds"] for answer in answers[:2]))
            except MeasurementFailed as reason:
                self._report_unavailable(running.contender.name, "futex round trip", str(reason))

    def micro(self, rounds: int, name: str, **arguments: Any) -> dict[str, Answers]:
        """Run a small benchmark; return the answers by contender: one list per round, in rank order."""
        answers: dict[str, Answers] = {}
        for _ in range(rounds):
            for running in list(self._running):
                label = running.contender.name
                try:
                    answers.setdefault(label, []).append(running.ask("micro", name=name, **arguments))
                except (ContenderUnavailable, MeasurementFailed) as reason:
                    answers.pop(label, None)
                    self._remove(running, "", str(reason))
        return answers

    def _remove(self, running: ContenderProcesses, case: str, reason: str) -> None:
        self._running.remove(running)
        running.stop(kill=True)
        self._report_unavailable(running.contender.name, case, f"failed: {reason}")

    def _report_unavailable(self, name: str, case: str, reason: str) -> None:
        self._result.unavailable.append((name, self._ranks, case, reason))
        if (name, reason) not in self._said:
            self._said.add((name, reason))
            self._say(f"{name} is not available{' for ' + case if case else ''}: {reason}")
