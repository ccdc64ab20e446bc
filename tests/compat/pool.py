"""Ranks of torch.distributed that live longer than a test.

    def twice(context, factor):
        x = torch.full((3,), float(context.rank))
        dist.all_reduce(x)
        return (factor * x).tolist()

    def test_a_sum(ranks):
        assert ranks(2).run(twice, 10) == [[10.0] * 3] * 2

torch.distributed has one state in a process, so its ranks are processes; meeting costs them more than a
test does, so they are kept.  In each the default group is over shoal, and ``context.gloo`` is a
group of the same ranks over Gloo (see :class:`tests.compat.rank.Context`).  Functions stand at the top
level of a module; arguments and values are pickled; warnings are errors,
but for deprecations (of which torch has many).

A function that raises, or does not return in time, ends the processes: the next call meets new ones.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.errors import RemoteError
from shoal.testing import Outcome, faults
from shoal.testing.outcome import reported, values
from shoal.testing.processes import fork_server, read_stacks
from shoal.testing.worker import DUMP_SIGNAL
from shoal.torch_terms import BACKEND

from .rank import serve

#: seconds that a call may take, and that the others get when one rank failed
_LIMIT, _PATIENCE = 60.0, 2.0
#: seconds that a rank gets for ending
_END_TIME = 20.0

#: Gloo says how many peers a rank is connected to; torch's C++ warns of methods that tests use; torch 2.12
#: reports optional packages for CUDA that are not installed
_EXPECTED = re.compile(r"^\[Gloo\]|API is being deprecated|CuTeDSL operators require optional")


class Pool:
    """Processes that are the ranks of one torch.distributed job.

    Args:
        size: number of ranks.
        backend: of the default group; None: none is made, for functions that call ``init_process_group``.
    """

    def __init__(self, size: int, backend: str | None = BACKEND) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="shoal-pool-")
        self._calls = 0
        self._ranks: list[_Rank] = []
        try:
            for rank in range(size):
                self._ranks.append(_Rank(rank, size, backend, self._home.name))
            port = self._ranks[0].channel.recv()
            for rank in self._ranks[1:]:
                rank.channel.send(port)
            values(self.collect(_LIMIT))
        except BaseException:
            self.kill_all()
            raise

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [rank.pid for rank in self._ranks]

    @property
    def usable(self) -> bool:
        """Whether it can be called: it was not closed, and no call failed."""
        return bool(self._ranks)

    def run(self, function: Callable[..., Any], *args: Any, limit: float = _LIMIT) -> list[Any]:
        """Call ``function(context, *args)`` on every rank.

        Args:
            limit: seconds until all must have returned.

        Returns:
            What it returned, in rank order.

        Raises:
            RemoteError: on some rank it raised, or did not return in time; with every such rank's traceback
                or stacks, and what it wrote.  The pool is not usable any more.
        """
        self.start(function, *args)
        outcomes = self.collect(limit)
        if all(outcome.ok for outcome in outcomes):
            return values(outcomes)
        try:
            values(outcomes)
        except RemoteError as error:
            raise RemoteError(f"{error}\n{self._written()}") from error.__cause__
        finally:
            self.kill_all()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function as ``run`` does, and return at once; :meth:`collect` gives what came of it."""
        payload = pickle.dumps((function, args))
        scratch = Path(self._home.name, str(self._calls))
        scratch.mkdir()
        self._calls += 1
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it ended; collect says so
                rank.channel.send((payload, scratch))

    def collect(self, limit: float = _LIMIT, patience: float = _PATIENCE) -> list[Outcome]:
        """What came of the call, in rank order; stacks of the ranks that are not ready in time.

        Args:
            limit: seconds until all must have returned.
            patience: seconds that the others get when one rank failed.
        """
        end = time.monotonic() + limit
        outcomes: dict[int, Outcome] = {}
        waiting = {rank.channel: rank for rank in self._ranks}
        while waiting:
            ready = connection.wait(list(waiting), max(end - time.monotonic(), 0))
            if not ready:
                break
            for channel in ready:
                rank = waiting.pop(channel)
                outcomes[rank.number] = rank.outcome()
                if not outcomes[rank.number].ok:
                    end = min(end, time.monotonic() + patience)
        for rank in waiting.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, DUMP_SIGNAL)
        for rank in waiting.values():
            stacks = rank.read_stacks() or "(no stacks: it is stopped, or does not answer signals)"
            outcomes[rank.number] = Outcome(rank.number, stacks=stacks, at=time.monotonic())
        return [outcomes[number] for number in range(len(self._ranks))]

    def kill(self, rank: int) -> None:
        """Kill a rank (SIGKILL), and return when it is gone."""
        faults.kill(self._ranks[rank].pid)

    def kill_all(self) -> None:
        """End all ranks at once."""
        for rank in self._ranks:
            rank.end(patience=0)
        self._ranks.clear()
        self._home.cleanup()

    def close(self) -> None:
        """Let the ranks destroy their groups and end.

        Raises:
            AssertionError: one did not end by itself and with exit code 0, or wrote something.
        """
        if not self._ranks:
            return
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.channel.send(None)
        codes = [rank.end(patience=_END_TIME) for rank in self._ranks]
        written = self._written()
        self._ranks.clear()
        self._home.cleanup()
        assert not any(codes), f"the ranks ended with the exit codes {codes}\n{written}"
        assert not written, written

    def _written(self) -> str:
        """What the ranks wrote to their standard output and error."""
        text = ""
        for rank in self._ranks:
            path = Path(self._home.name, f"rank{rank.number}.txt")
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines := [line for line in lines if not _EXPECTED.search(line)]:
                text += "\n".join((f"rank {rank.number} wrote:", *lines, ""))
        return text

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill_all()


class Pools:
    """``pools(2)``: the pool of two ranks; made when it is first asked for, and anew when a call failed.

    Args:
        backend: as for :class:`Pool`.
    """

    def __init__(self, backend: str | None = BACKEND) -> None:
        self._backend = backend
        self._pools: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        if size not in self._pools or not self._pools[size].usable:
            self._pools[size] = Pool(size, backend=self._backend)
        return self._pools[size]

    def close(self) -> None:
        """Let all ranks destroy their groups and end; see :meth:`Pool.close`."""
        with contextlib.ExitStack() as stack:
            for pool in self._pools.values():
                stack.callback(pool.kill_all)
            for pool in self._pools.values():
                pool.close()


class _Rank:
    """One process and the pipes that lead to it."""

    def __init__(self, number: int, size: int, backend: str | None, home: str) -> None:
        self.number = number
        self.channel, channel = connection.Pipe()
        self._dumps, dumps = connection.Pipe(duplex=False)
        self._process = fork_server().Process(
            target=serve, args=(number, size, backend, home, channel, dumps), name=f"torch rank {number}"
        )
        try:
            self._process.start()
        finally:
            # Only the rank holds these ends now, so that its end shows.
            channel.close()
            dumps.close()
        self.pid = self._process.pid or 0

    def outcome(self) -> Outcome:
        """What the rank reports, which has something to say or ended."""
        try:
            kind, raw, text, at = self.channel.recv()
        except (EOFError, OSError):
            self._process.join(_END_TIME)
            return Outcome(self.number, exitcode=self._process.exitcode, at=time.monotonic())
        return reported(self.number, kind, raw, text, at)

    def read_stacks(self) -> str:
        """What the rank writes about its threads, until it says nothing for a while."""
        return read_stacks(self._dumps)

    def end(self, patience: float) -> int | None:
        """Wait until the rank ended, kill it after ``patience`` seconds; returns its exit code."""
        self._process.join(patience)
        if self._process.is_alive():
            faults.kill(self.pid)
            self._process.join(_END_TIME)
        code = self._process.exitcode
        self._process.close()
        self.channel.close()
        self._dumps.close()
        return code
