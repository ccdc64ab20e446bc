"""The event loop of a launcher: exits, signals, deadlines and output of the ranks.

It uses one thread and one epoll set.  The kernel lists ready descriptors in the order in which they became
ready, so exits (seen through a ``pidfd``) are handled in the order in which they happened, even if many are
ready at once.

The phases of a job::

    RUNNING --a rank fails-----> FAILED    the others get SIGTERM, and SIGKILL a moment later;
       |      and too few are left |       the rank that caused it (causes.py) may end by itself
       |-----SIGINT, SIGTERM---> STOPPING  passed on; SIGKILL after the grace time or a second SIGINT
       v                           |
    every rank has ended <---------+----> kill the rest of their process groups,
                                          write the last output, then the summary

With ``respawn``, if a rank fails while enough others go on, a new process starts in its slot after a delay
(slots.py).  Until it reports that it has joined the others, it is a *newcomer*: it does not count for
``min_ranks``, and when all others have ended it is ended too, without a message.  Spares are newcomers from
the start, which the ranks let join only to replace a lost rank.

A ``RankLauncher`` starts the processes, on this machine or on other hosts.  If a host is lost, all its ranks
end at the same time.
"""

from __future__ import annotations

import enum
import math
import os
import selectors
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from ...errors import LaunchError, UsageError
from ..output import causes, summary
from ..output.output import RankOutput
from ..output.waiting import WaitingTable
from ..ranks.rank import LOST, JobProcess
from ..ranks.slots import Respawn, last_of_slots, plan_scale
from .control import ControlServer
from .evictions import Evictions
from .job_store import ExitNotifier
from .launch import JobOutcome, JobStart
from .rank_launcher import RankLauncher
from .signals import STOP, SUSPEND, CtrlCFilter, stop_this_process

#: seconds between SIGTERM and SIGKILL for the peers of a failed rank: all end within a second
FAILURE_GRACE_S = 0.6
#: seconds for the rank that failed first to exit by itself, to get its traceback and exit code
CULPRIT_GRACE_S = 5.0
#: seconds for child processes of a finished rank to exit by themselves
_LINGER_S = 0.5
_POLL_INTERVAL_S = 0.02
#: maximum time in seconds to write the last output after a second stop signal
_QUIET_S = 1.0
#: seconds until a message about a rank that ended without leaving a group, while others run
EARLY_EXIT_WARNING_S = 10.0


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    FAILED = enum.auto()
    STOPPING = enum.auto()


class Supervisor:
    """Runs one start of a job until all its processes have ended.

    ``notes`` publishes the ranks that end while others run, and the wanted number of ranks.

    Call :meth:`start` before this process has threads, :meth:`run` once, and :meth:`close` in any case.
    """

    def __init__(self, start: JobStart, rank_launcher: RankLauncher, notes: ExitNotifier) -> None:
        options = start.options
        self._job_start = start
        self._signals = start.signals
        self._counters = start.counters
        self._rank_launcher = rank_launcher
        self._min_ranks = options.min_ranks
        self._respawn = Respawn()
        self._grace = options.grace
        self._notes = notes
        self._ranks: list[JobProcess] = []
        self._phase = _Phase.RUNNING
        self._culprit: JobProcess | None = None
        #: the ranks that failed while enough others went on, and the one after which too few were left
        self._survived_failures: list[JobProcess] = []
        self._fatal_rank: JobProcess | None = None
        self._stop_signal = 0
        self._ctrl_c = CtrlCFilter()
        #: times of actions that are due; infinity: not planned
        self._kill_at = math.inf
        #: the time to look for ranks that exited without leaving a group
        self._early_exit_at = math.inf
        self._warned_of_early_exits = False
        #: the time until which the culprit may exit by itself
        self._culprit_deadline = math.inf
        #: wanted number of ranks, without spares
        self._wanted = rank_launcher.size
        #: number of processes to start as soon as others have left
        self._deferred_starts = 0
        self._selector = selectors.DefaultSelector()
        scalable = options.max_ranks is not None
        self._control = ControlServer(self._selector, self._scale) if scalable else None
        self._output: RankOutput | None = None
        #: messages before there is an output: ranks on other hosts may fail while others are started
        self._early_messages: list[bytes] = []
        self._sweeping = self._closing = self._stop_now = False
        #: a host was lost before it had sent all output of its ranks
        self._host_output_lost = False
        self._waiting = WaitingTable()
        self._evictions = Evictions(options.grace, self._on_evicted, self._waiting.add)
        rank_launcher.watch(self._selector, self._print, self._host_lost)

    def start(self) -> None:
        """Start the initial ranks and the spares; raises LaunchError."""
        size = self._rank_launcher.size
        for slot in range(size):
            self._add(self._rank_launcher.start(slot, slot, 0, newcomer=False))
        for slot in range(size, size + self._rank_launcher.spares):
            self._add(self._rank_launcher.start(slot, slot, 0, newcomer=True))
        self._rank_launcher.wait_started()

    def _add(self, rank: JobProcess) -> None:
        self._ranks.append(rank)
        self._counters.processes.append(rank)
        rank.meetings = self._evictions.meetings
        take_notices = partial(self._evictions.take_notices, rank, self._ranks)
        rank.watch(self._selector, lambda: self._on_exit(rank), take_notices)

    def run(self) -> JobOutcome:
        """Run the loop until the ranks and their process groups have ended; return the outcome.

        The exit code is that of the rank that failed first; 128 plus the signal number if a signal to the
        launcher ended the job; ``LOST`` if output was lost; otherwise 0.
        """
        output = self._output = RankOutput(
            self._selector,
            self._signals.wake,
            self._rank_launcher.max_ranks + self._rank_launcher.spares,
            line_format=self._job_start.options.line_format,
            logs=self._job_start.logs,
        )
        for text in self._early_messages:
            output.say(text)
        for rank in self._ranks:
            output.attach(rank)
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._signalled)
        metrics = self._job_start.metrics
        if metrics is not None and metrics.start():
            output.say(f"shoal: metrics: {metrics.url}".encode())
        while any(rank.status is None for rank in self._ranks):
            self._run_once()
        self._sweep(output)
        output.drain()
        code = self._conclude(output)
        if self._job_start.options.summary:
            for line in self._waiting.lines(self._ranks):
                output.say(line)
        output.close()
        end = time.monotonic() + (_QUIET_S if self._stop_now else math.inf)
        self._closing, self._stop_now = True, False
        while not output.ended and not self._stop_now and time.monotonic() < end:
            self._run_once(_POLL_INTERVAL_S)
        for text in output.new_troubles():  # errors of writing the last lines
            with suppress(OSError):
                os.write(2, text + b"\n")
        return JobOutcome(code or (LOST if output.lost else 0), self._failed)

    @property
    def _failed(self) -> bool:
        """Whether a rank has failed, and no signal has stopped the job."""
        return self._phase is _Phase.FAILED and not self._stop_signal

    def close(self) -> None:
        for rank in self._ranks:
            rank.send_group(signal.SIGKILL)
            rank.reap()
        self._rank_launcher.close()
        if self._control is not None:
            self._control.close()
        self._selector.close()

    # -- the loop ------------------------------------------------------------------------------

    def _run_once(self, timeout: float = math.inf) -> None:
        """Handle ready descriptors; wait for at most ``timeout`` seconds or until the next deadline."""
        assert self._output is not None
        now = time.monotonic()
        restarts = self._respawn if self._phase is _Phase.RUNNING else None
        due_at = min(
            now + timeout, self._kill_at, self._culprit_deadline, self._ctrl_c.remind_at, self._early_exit_at,
            self._evictions.next_at(), self._rank_launcher.next_at(), self._output.next_show(),
            math.inf if restarts is None else restarts.next_at(),
        )  # fmt: skip
        for key, _ in self._selector.select(None if due_at == math.inf else max(0.0, due_at - now)):
            key.data()
        self._output.show()
        now = time.monotonic()
        self._rank_launcher.tick(now)
        self._evictions.tick(now)
        if now >= self._ctrl_c.remind_at:
            self._print_waiting(now)
        if now >= self._early_exit_at:
            self._warn_of_early_exits()
        if now >= self._kill_at:
            self._kill()
        if now >= self._culprit_deadline:
            self._culprit_deadline = math.inf
            self._end_all()
        if restarts is not None and self._phase is _Phase.RUNNING:
            for slot in restarts.due(now):
                self._start_in(slot)

    def _on_exit(self, rank: JobProcess) -> None:
        status = rank.status
        assert status is not None
        # Notes are read by the initial ranks, and use their numbers, which a newcomer does not have.
        if not rank.newcomer and any(other.status is None for other in self._ranks):
            self._notes.ended(rank.slot, summary.describe(status))
        if status == 0 and self._early_exit_at == math.inf and not self._warned_of_early_exits:
            self._early_exit_at = time.monotonic() + EARLY_EXIT_WARNING_S
        if rank is self._culprit:
            self._culprit_deadline = math.inf
        if self._phase is _Phase.RUNNING and rank.leaving:
            self._on_left(rank)
        elif self._phase is _Phase.RUNNING and status != 0 and not rank.dismissed:
            self._on_failed(rank)
        elif self._phase is _Phase.RUNNING and rank.evicted:
            self._print(summary.ended_evicted(rank, self._plan_restart(rank.slot, rank.seconds)))
        self._stop_restarts_if_over()

    def _print(self, text: bytes) -> None:
        if self._output is None:
            self._early_messages.append(text)
        else:
            self._output.say(text)

    def _host_lost(self, host: str, why: str, ranks: Sequence[JobProcess]) -> None:
        """Handle the loss of a host and of its ``ranks``, which have the status ``LOST``."""
        self._print(summary.host_lost(host, why, ranks))
        self._host_output_lost |= self._sweeping
        for rank in ranks:
            self._on_exit(rank)

    def _on_evicted(self, rank: JobProcess) -> None:
        self._counters.evictions += 1
        self._print(summary.evicted(rank))

    def _on_failed(self, rank: JobProcess) -> None:
        self._counters.failures += 1
        self._read_reports()  # to know which processes have joined
        left = [other for other in self._ranks if other.counts and not other.status]
        if not rank.is_member or (self._min_ranks is not None and len(left) >= self._min_ranks):
            self._survived_failures.append(rank)
            then = summary.spares(self._ranks) if rank.is_member and self._rank_launcher.spares else ""
            then += self._plan_restart(rank.slot, rank.seconds)
            self._print(summary.failed_but_going_on(rank, left, then))
        else:
            self._phase, self._fatal_rank = _Phase.FAILED, rank
            first = self._ranks[self._cause()]
            if first.status is None:
                self._culprit, self._culprit_deadline = first, time.monotonic() + CULPRIT_GRACE_S
            self._end_all()

    def _plan_restart(self, slot: int, lived: float) -> str:
        """Plan the restart of ``slot``, whose process ran for ``lived`` seconds; return a message on it."""
        if not self._job_start.options.respawn or not self._runs_a_member():
            return ""
        place = self._place_of_next(slot)
        if place is None:
            return summary.NO_PLACE
        wait = self._respawn.failed(place, lived, time.monotonic())
        return summary.next_process(wait, spares=self._rank_launcher.spares > 0)

    def _place_of_next(self, slot: int) -> int | None:
        """The slot for the next process after that of ``slot``: another one if ``slot`` cannot be used."""
        taken = {rank.slot for rank in self._ranks if rank.status is None} | self._respawn.waiting
        slots = (slot, *range(self._rank_launcher.slots))
        return next(
            (each for each in slots if each not in taken and self._rank_launcher.can_start(each)), None
        )

    def _start_in(self, slot: int) -> bool:
        """Start a newcomer in ``slot``; return whether it was started."""
        assert self._output is not None
        before = last_of_slots(self._ranks).get(slot)
        if before is not None and not before.is_released:
            self._rank_launcher.release(before)
        restart = 0 if before is None else before.restart + 1
        try:
            rank = self._rank_launcher.start(len(self._ranks), slot, restart, newcomer=True)
        except LaunchError as error:
            self._print(summary.not_started(error, self._plan_restart(slot, 0.0)))
            return False
        self._add(rank)
        self._output.attach(rank)
        return True

    def _scale(self, wanted: int) -> str:
        """Change the number of ranks, without spares; return a description; raises UsageError."""
        self._read_reports()
        min_ranks, max_ranks = self._min_ranks or 1, self._rank_launcher.max_ranks
        if self._phase is not _Phase.RUNNING or not self._runs_a_member():
            raise UsageError("the job is ending")
        if not min_ranks <= wanted <= max_ranks:
            raise UsageError(f"{wanted}: the job runs with --min {min_ranks} --max {max_ranks}")
        waiting = self._respawn.waiting
        last = last_of_slots(self._ranks)
        usable = [slot for slot in range(self._rank_launcher.slots) if self._rank_launcher.can_start(slot)]
        found = plan_scale(wanted, usable, last, waiting, spares=self._rank_launcher.spares)
        self._wanted, self._deferred_starts = wanted, found.later
        self._notes.wanted(wanted)  # otherwise a spare would replace a rank that leaves
        self._respawn.cancel(waiting.intersection(found.stop))
        text = summary.scaled(wanted, found.start, found.stop, found.later)
        self._print(f"shoal: {text}".encode())
        for slot in set(found.stop) - waiting:
            last[slot].leaving = True
            last[slot].send(signal.SIGTERM)
        for slot in found.start:
            self._start_in(slot)
        return text

    def _on_left(self, rank: JobProcess) -> None:
        self._print(summary.left(rank))
        while self._deferred_starts > 0:
            place = self._place_of_next(rank.slot)
            if place is None or not self._start_in(place):
                break  # retried when another rank has left
            self._deferred_starts -= 1

    def _runs_a_member(self) -> bool:
        return any(rank.is_member and rank.status is None and not rank.evicted for rank in self._ranks)

    def _stop_restarts_if_over(self) -> None:
        """If the job ends, start no more processes, and end newcomers, which have no ranks left to join."""
        self._read_reports()
        if self._phase is _Phase.RUNNING and self._runs_a_member():
            return
        self._deferred_starts = 0
        self._respawn.cancel(self._respawn.waiting)
        newcomers = [rank for rank in self._ranks if rank.status is None and not rank.evicted]
        if newcomers and self._phase is _Phase.RUNNING and self._kill_at == math.inf:
            self._kill_at = time.monotonic() + FAILURE_GRACE_S
            for rank in newcomers:
                rank.dismissed = True
                rank.send(signal.SIGTERM)

    def _warn_of_early_exits(self) -> None:
        """Warn once of ranks that exited with 0 without leaving a group, while others run.

        The launcher cannot know whether the others wait for them, as in torch's init_process_group.
        """
        self._early_exit_at = math.inf
        self._read_reports()
        finished = [rank for rank in self._ranks if rank.status == 0 and rank.is_member]
        early = [rank for rank in finished if not (rank.reports or rank.leaving)]
        running = [rank for rank in self._ranks if rank.status is None]
        if early and running:
            self._warned_of_early_exits = True
            if self._phase is _Phase.RUNNING:
                self._print(summary.early_exits(early, running))

    def _read_reports(self) -> None:
        for rank in self._ranks:
            if not rank.is_released:
                rank.read_reports()
                self._evictions.take_notices(rank, self._ranks)

    def _cause(self) -> int:
        self._read_reports()
        if self._survived_failures and self._fatal_rank is not None:
            return causes.origin(self._ranks, self._fatal_rank)
        found = causes.cause(self._ranks)
        assert found is not None
        return found

    def _end_all(self) -> None:
        """End every rank except a culprit that may still exit by itself, because one has failed."""
        self._kill_at = time.monotonic() + FAILURE_GRACE_S
        for rank in self._ranks:
            if rank.status is None and not self._may_exit_by_itself(rank):
                rank.stopping = True
                rank.send(signal.SIGTERM)

    def _may_exit_by_itself(self, rank: JobProcess) -> bool:
        return rank is self._culprit and self._culprit_deadline < math.inf

    def _signalled(self) -> None:
        assert self._output is not None
        for number in self._signals.read():
            if number in STOP and self._phase is _Phase.FAILED:
                self._stop_signal = number  # the exit code stays that of the failure
            if number in STOP and (self._closing or self._is_repeated_stop(number)):
                # The user does not want to wait until the last output is read.
                self._stop_now = True
            elif number in SUSPEND:
                self._suspend(number)
            elif self._closing:
                continue
            elif number not in STOP:
                self._send(number)
            elif self._phase is _Phase.RUNNING:
                self._phase, self._stop_signal = _Phase.STOPPING, number
                self._kill_at = time.monotonic() + self._grace
                self._stop(number)
            elif self._phase is _Phase.STOPPING:
                self._stop(number)
            elif self._culprit_deadline < math.inf:
                self._culprit_deadline = math.inf
                self._end_all()
        self._output.resume()

    def _suspend(self, number: int) -> None:
        """Stop the ranks, and this process by signal ``number``, until it is continued."""
        began = time.monotonic()
        running = [rank for rank in self._ranks if rank.status is None]
        for rank in running:
            # Not SIGTSTP: it does not stop a process whose parent is in another session.
            rank.send_group(signal.SIGSTOP)
        self._rank_launcher.suspend()
        stop_this_process(number)
        self._rank_launcher.resume()
        for rank in running:
            rank.send_group(signal.SIGCONT)
        stopped = time.monotonic() - began
        self._kill_at += stopped
        self._culprit_deadline += stopped

    def _is_repeated_stop(self, number: int) -> bool:
        """Whether a signal is a repeated request to stop, after a signal or a failure has ended all ranks."""
        again = number != signal.SIGINT or self._ctrl_c.is_another(time.monotonic())
        return self._sweeping and self._phase is not _Phase.RUNNING and again

    def _stop(self, number: int) -> None:
        """Pass SIGINT or SIGTERM on; a second SIGINT kills."""
        now = time.monotonic()
        if number != signal.SIGINT or self._ctrl_c.is_first(now):
            self._send(number)
        elif self._ctrl_c.is_another(now):
            self._kill()

    def _print_waiting(self, now: float) -> None:
        self._ctrl_c.remind_at = math.inf
        left = [rank for rank in self._ranks if rank.status is None]
        if left and self._kill_at < math.inf:
            self._print(summary.waiting(self._kill_at - now, left))

    def _send(self, number: int) -> None:
        """Send a signal to every running rank.

        SIGINT is also sent to the rank's children, as by Ctrl-C at a terminal.  Other signals are not: a rank
        that saves its work on SIGTERM still needs its child processes, and SIGUSR1 would kill them.
        """
        for rank in self._ranks:
            if rank.status is None and number == signal.SIGINT:
                rank.send_group(number)
            elif rank.status is None:
                rank.send(number)

    def _kill(self) -> None:
        self._kill_at = math.inf
        for rank in self._ranks:
            if not self._may_exit_by_itself(rank):
                rank.send_group(signal.SIGKILL)

    # -- the end -------------------------------------------------------------------------------

    def _sweep(self, output: RankOutput) -> None:
        self._kill_at = math.inf
        self._sweeping = True
        orderly = self._phase is _Phase.RUNNING
        sweep = self._rank_launcher.sweep(self._ranks, _LINGER_S if orderly else 0.0)
        while not sweep.is_done() and not self._stop_now:
            self._run_once(_POLL_INTERVAL_S)
        if orderly and sweep.killed:
            output.say(summary.leftovers(sweep.killed))

    def _conclude(self, output: RankOutput) -> int:
        """Print the summary if something failed; return the exit code."""
        if self._phase is _Phase.FAILED:
            first = self._cause()
            output.say(summary.failure(self._ranks, first, output.tail(self._ranks[first])))
            restart = self._job_start.restart
            if restart and self._failed:
                output.say(f"shoal: {restart}".encode())
                for slot in range(self._rank_launcher.size):
                    output.mark_log(slot, restart)
            return causes.exit_code(self._ranks, first)
        if self._stop_signal and any(rank.status for rank in self._ranks):
            output.say(summary.stopped(self._stop_signal, self._ranks))
            return 128 + self._stop_signal
        if self._stop_signal and self._stop_now:
            return 128 + self._stop_signal  # the last output of the ranks is lost
        if self._survived_failures:
            output.say(summary.succeeded_with_failures(self._ranks, self._survived_failures, self._wanted))
        return LOST if self._host_output_lost else 0
