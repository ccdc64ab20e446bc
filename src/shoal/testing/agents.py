"""RPC workers in tests: agents of this process, with or without a thread, and processes.

They meet in a store of the test's process and serve calls until the end of the block.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import UsageError
from ..net import Deadline
from ..rpc import Agent, join
from ..store import Store, TCPStore, TCPStoreServer
from . import faults
from .leaks import left_at
from .outcome import Outcome, failed, values
from .processes import Child, kill_late, pickled_work, wait_for_ends
from .threads import stack_of
from .worker import run_worker

#: seconds that a worker gets to end
END_TIMEOUT_S = 5.0
#: seconds between polls
POLL_INTERVAL_S = 0.005


def run_agents(
    work: Mapping[str, Callable[..., Any] | None],
    *args: Any,
    processes: bool = False,
    timeout: float = 60.0,
    **settings: Any,
) -> dict[str, Any]:
    """Run ``work[name](agent, *args)`` at each worker and return the results.

    All workers serve calls until all functions have returned. A worker whose function is None only serves.

    Args:
        work: function of each worker, by worker name.
        args: further arguments of the functions.
        processes: run workers as processes instead of threads; the functions must then be defined at the top
            level of a module.
        timeout: seconds until all functions must have returned.
        settings: arguments of ``shoal.rpc.join``.

    Returns:
        The results by name, for the workers with a function.

    Raises:
        RemoteError: at least one function raised or did not return in time, or its process ended. The message
            has each such worker's traceback, exit code or stacks, in the order of failure.
    """
    with Agents(timeout=timeout) as agents:
        for name, fn in work.items():
            if processes:
                agents.start(name, fn, *args, **settings)
            elif fn is None:
                agents.join(name, **settings)
            else:
                agents.run(name, fn, *args, **settings)
        outcomes = agents.outcomes()
        return dict(zip(outcomes, values(list(outcomes.values())), strict=True))


class Agents:
    """RPC workers that a test starts and injects faults into.

        with Agents() as workers:
            a = workers.join("a")                    # an agent of this process
            workers.start("ps")                      # a process, which serves
            workers.run("b", train, "ps")            # train(agent, "ps") in a thread
            assert a.peer("ps").call(os.getpid).wait() == workers.pids["ps"]
            workers.kill("ps")
            assert workers.outcome("ps").exitcode == -signal.SIGKILL

    A worker serves calls until the end of the block, even after its function has returned. At the end of the
    block processes are killed and agents are closed. A worker whose function raises closes its agent at once,
    as after a crash.

    The end of the block does not wait for functions. It raises the exceptions of functions that have failed
    and whose :meth:`outcome` was not requested, and stops functions that still run without an error. So
    request the outcome of each function that must succeed.

    Args:
        timeout: seconds that :meth:`outcome` waits; after that the outcome has the worker's stacks.

    Attributes:
        url, secret: the workers' rendezvous, for other processes to join.
        store: a client of the store at ``url``.
        pids: process ids of the workers that are processes, by name.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        self.secret = secrets.token_hex(16)
        self.pids: dict[str, int] = {}
        self._timeout = timeout
        self._local: dict[str, Agent] = {}
        self._workers: dict[str, _Thread | _Process] = {}
        self._asked: set[str] = set()
        self._server = TCPStoreServer(secret=self.secret.encode()).start()
        self.url = self._server.url
        try:
            self.store: Store = TCPStore(self._server.host, self._server.port, self.secret.encode())
        except BaseException:
            self._server.close()
            raise

    def join(self, name: str, **settings: Any) -> Agent:
        """Create an agent of this process with ``shoal.rpc.join``; it is closed at the end of the block."""
        self._local[name] = agent = join(name, **self._settings(settings))
        return agent

    def run(self, name: str, fn: Callable[..., Any], *args: Any, **settings: Any) -> Agent:
        """Call ``fn(agent, *args)`` in a thread of this process, with a new agent.

        Args:
            name: name of the worker.
            settings: arguments of ``shoal.rpc.join``.

        Returns:
            The agent, immediately; :meth:`outcome` waits for ``fn``.
        """
        agent = self.join(name, **settings)
        self._workers[name] = _Thread(agent, fn, args)
        return agent

    def start(
        self,
        name: str,
        fn: Callable[..., Any] | None = None,
        *args: Any,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        **settings: Any,
    ) -> int:
        """Start a worker as a process, in a few milliseconds, and return its process id.

        Args:
            name: name of the worker; a worker that has died may be started again.
            fn: called in the process as ``fn(agent, *args)``; imported by name. If None, it only serves.
            env: additional environment variables.
            prepare: called in the process before it joins.
            settings: arguments of ``shoal.rpc.join``.
        """
        payload = pickled_work(fn, args, prepare)
        there = self._workers.get(name)
        if isinstance(there, _Process):
            if there.ends:
                there.child.process.join(END_TIMEOUT_S)
            if there.child.process.is_alive():
                raise UsageError(f"worker {name!r} is already a running process")
            there.close()
        worker = _Process(name, payload, dict(env or {}), self._settings(settings), fn is not None)
        self._workers[name] = worker
        self.pids[name] = worker.child.pid
        return worker.child.pid

    # -- outcomes ------------------------------------------------------------------------------

    def outcome(self, name: str) -> Outcome:
        """Wait until a worker's function has ended, or its process; kill a process that is late.

        Returns:
            The outcome, with ``worker`` set to the name. A process without a function has an ``exitcode`` and
            no ``value``.
        """
        self._asked.add(name)
        found = self._workers.get(name)
        if found is None:
            raise UsageError(f"worker {name!r} has neither a function nor a process to wait for")
        return found.outcome(Deadline(self._timeout))

    def outcomes(self) -> dict[str, Outcome]:
        """Wait for the outcomes of all workers with a function and return them by name.

        After the first failure the other functions get five more seconds, because they may wait for it.
        """
        working = {name: worker for name, worker in self._workers.items() if worker.works}
        self._asked.update(working)
        deadline, hurried = Deadline(self._timeout), False
        while not deadline.expired:
            ended = [worker for worker in working.values() if worker.has_ended()]
            if len(ended) == len(working):
                break
            if not hurried and not all(worker.outcome(Deadline(0.0)).ok for worker in ended):
                deadline, hurried = Deadline(min(END_TIMEOUT_S, deadline.remaining())), True
            time.sleep(POLL_INTERVAL_S)
        return {name: worker.outcome(Deadline(0.0)) for name, worker in working.items()}

    def leave(self, name: str) -> None:
        """Make a worker process close its agent and exit; :meth:`outcome` waits for that."""
        worker = self._process(name)
        worker.ends = True
        with contextlib.suppress(OSError):  # the process has ended
            worker.control.send("leave")

    # -- faults --------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill a worker process (SIGKILL)."""
        worker = self._process(name)
        worker.ends = True
        if worker.child.process.is_alive():
            faults.kill(worker.child.pid)

    def stop(self, name: str) -> None:
        """Stop a worker process (SIGSTOP); return when it is stopped."""
        faults.stop(self._process(name).child.pid)

    def resume(self, name: str) -> None:
        """Resume a stopped worker (SIGCONT)."""
        faults.resume(self._process(name).child.pid)

    def delay(self, name: str, seconds: float) -> None:
        """Stop a worker process for ``seconds``; return immediately."""
        faults.delay(self._process(name).child.pid, seconds)

    def cut(self, name: str, other: str) -> int:
        """Break all connections between two workers and return their number.

        Pending operations between them fail. The next call reconnects once the worker has noticed the break;
        agents of this process have noticed it when this method returns.
        """
        pairs = [(self._local[one], two) for one, two in ((name, other), (other, name)) if one in self._local]
        if not pairs:
            return faults.cut(self._process(name).child.pid, self._process(other).child.pid, local=True)
        lines = [line for agent, two in pairs for line in agent.connections.connections_of(two)]
        count = faults.disconnect(*pairs[0])
        end = time.monotonic() + END_TIMEOUT_S
        while not all(line.ended for line in lines) and time.monotonic() < end:  # the agents notice it
            time.sleep(POLL_INTERVAL_S)
        return count

    # -- leaks ---------------------------------------------------------------------------------

    def left(self) -> set[str]:
        """Describe the objects, references and calls that the workers keep for one another now."""
        found = set()
        for agent in self._local.values():
            if not agent.closed:
                found |= left_at(agent)
        for worker in self._workers.values():
            if isinstance(worker, _Process):
                found |= worker.left()
        return found

    @contextlib.contextmanager
    def no_leaks(self, patience: float = END_TIMEOUT_S) -> Iterator[None]:
        """Fail if the block leaves new objects, references or calls at any worker.

        For threads, descriptors and memory of this process use :func:`~shoal.testing.no_leaks` around the
        ``Agents`` block. After the death of a worker, ``patience`` must exceed 10 s, for which its references
        are kept.

        Args:
            patience: seconds to wait for the leftovers to disappear.

        Raises:
            AssertionError: with a list of the leaks.
        """
        before = self.left()
        yield
        end = time.monotonic() + patience
        while more := self.left() - before:
            if time.monotonic() > end:
                raise AssertionError("left: " + "; ".join(sorted(more)))
            time.sleep(POLL_INTERVAL_S)

    # -- the end -------------------------------------------------------------------------------

    def close(self, *, graceful: bool = False) -> None:
        """End all workers and release everything.

        Args:
            graceful: let agents of this process finish their calls; processes are killed in any case.
        """
        with contextlib.ExitStack() as steps:
            steps.callback(self._server.close)
            steps.callback(self.store.close)
            for agent in self._local.values():
                steps.callback(agent.close, END_TIMEOUT_S, graceful=graceful)
            for worker in self._workers.values():
                steps.callback(worker.close)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:  # otherwise the test's error may have caused these failures
                rest = [worker for name, worker in self._workers.items() if name not in self._asked]
                ended = [worker.outcome(Deadline(0.0)) for worker in rest if worker.has_ended()]
                values([outcome for outcome in ended if outcome.error is not None])
        finally:
            self.close(graceful=error is None)

    def _settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"url": self.url, "secret": self.secret, **settings}

    def _process(self, name: str) -> _Process:
        worker = self._workers.get(name)
        if not isinstance(worker, _Process):
            where = "an agent of this process" if name in self._local else "not there"
            raise UsageError(f"worker {name!r} is {where}: only a process can be stopped or killed")
        return worker


class _Thread:
    """A worker whose function runs in a thread of this process."""

    works = True

    def __init__(self, agent: Agent, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._agent = agent
        self._outcome: Outcome | None = None
        # A daemon thread, so that a hanging function cannot keep the test run from exiting.
        self._thread = threading.Thread(
            target=self._run, args=(fn, args), name=f"worker {agent.name}", daemon=True
        )
        self._thread.start()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        name = self._agent.name
        try:
            value = fn(self._agent, *args)
        except BaseException as error:
            self._outcome = failed(-1, error, time.monotonic(), name)
            self._agent.close(graceful=False)  # like the end of a process
        else:
            self._outcome = Outcome(-1, value, at=time.monotonic(), worker=name)

    def has_ended(self) -> bool:
        return self._outcome is not None

    def outcome(self, deadline: Deadline) -> Outcome:
        self._thread.join(deadline.remaining())
        if self._outcome is None:
            at, stack = time.monotonic(), stack_of(self._thread)
            return Outcome(-1, stacks=stack, at=at, worker=self._agent.name)
        return self._outcome

    def close(self) -> None:
        if self._outcome is None:
            self._agent.close(graceful=False)
        self._thread.join(END_TIMEOUT_S)


class _Process:
    def __init__(
        self, name: str, payload: bytes, env: dict[str, str], settings: dict[str, Any], works: bool
    ) -> None:
        self.works = works
        #: whether the test has requested its end
        self.ends = False
        self._name = name
        self._given_up: Outcome | None = None
        self._asking = threading.Lock()
        self.control, control = multiprocessing.Pipe()
        try:
            self.child = Child(f"worker {name}", run_worker, name, payload, env, settings, control)
        except BaseException:
            self.control.close()
            raise
        finally:
            control.close()

    def has_ended(self) -> bool:
        return not wait_for_ends([self.child], Deadline(0.0), reports=True)

    def outcome(self, deadline: Deadline) -> Outcome:
        if self._given_up is None:
            late = wait_for_ends([self.child], deadline, reports=True)
            if not late:
                return self.child.outcome(worker=self._name)
            stacks = kill_late(late)[self.child]
            self._given_up = Outcome(-1, stacks=stacks, at=time.monotonic(), worker=self._name)
        return self._given_up

    def left(self) -> set[str]:
        with self._asking, contextlib.suppress(EOFError, OSError):  # the process has ended
            self.control.send("left")
            return set(self.control.recv())
        return set()

    def close(self) -> None:
        self.child.close()
        self.control.close()
