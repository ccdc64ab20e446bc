"""Forked children: they get nothing that works, they end as they like, and nobody notices them."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import ForkedProcess, Future, ProcessGroup
from shoal.testing import no_leaks, processes, run_processes, run_threads
from tests.support.topologies import TOPOLOGIES, topology_options

from .ranks import PATIENCE, descriptors, mappings, quiet_fork

SIZE = 3
#: children of each rank while it works
FORKS = 5


def run(fn: Callable[..., Any], topology: str, *args: Any) -> list[Any]:
    """``fn`` on ranks that are processes: what a fork copies are all ranks' groups if they are threads."""
    with no_leaks():
        return run_processes(fn, SIZE, *args, timeout=PATIENCE, **topology_options(topology, SIZE))


def in_child(fn: Callable[[], object]) -> str:
    """What ``fn`` returned in a forked child, as text, or the traceback of what it raised."""
    reading, writing = os.pipe()
    child = quiet_fork()
    if child == 0:
        try:
            text = repr(fn())
        except BaseException:
            text = traceback.format_exc()
        os.write(writing, text.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return text if status == 0 else f"{text} (the child ended with {os.waitstatus_to_exitcode(status)})"


def still_works(group: ProcessGroup) -> None:
    for n in (1, 100_000):
        assert bool((group.all_reduce(torch.ones(n)).wait() == group.size).all())
        assert bool((group.all_reduce(group.empty(n).fill_(1.0)).wait() == group.size).all())


def kind_of(call: Callable[[], object]) -> str:
    """The class of what ``call`` raises, and whether it says what to do."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def use_in_child(group: ProcessGroup) -> list[str]:
    part = group.subgroup([0, 1, 2])
    x = group.empty(100_000).fill_(1.0)
    still_works(group)
    before, after = (group.rank - 1) % SIZE, (group.rank + 1) % SIZE
    pending: list[Future[Any]] = [group.recv(None, after), part.recv(x, after)]
    done = group.barrier()
    done.wait()

    def child() -> list[str]:
        return [
            str(group.state),
            kind_of(group.barrier),
            kind_of(lambda: group.all_reduce(torch.ones(1))),
            kind_of(lambda: part.send(torch.ones(1), after)),
            kind_of(lambda: group.empty(10)),
            kind_of(lambda: group.split(0)),
            *(kind_of(future.wait) for future in pending),
            *(kind_of(lambda future=future: future.wait(0.1)) for future in pending),  # type: ignore[misc]
            kind_of(done.wait),
            kind_of(group.close),
            kind_of(lambda: group.abort("not ours")),
        ]

    text = in_child(child)
    group.send(torch.ones(1), before).wait()
    part.send(x, before).wait()
    for future in pending:
        future.wait()
    still_works(group)
    still_works(part)
    return [text]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_whatever_a_child_tries_is_refused_and_the_parent_goes_on(topology: str) -> None:
    refused, fine = [ForkedProcess.__name__], ["nothing"]
    expected = repr(["forked", *refused * 9, *fine * 3])
    assert run(use_in_child, topology) == [[expected]] * SIZE


def look_around_in_child(group: ProcessGroup) -> list[str]:
    part = group.subgroup([0, 1, 2])
    with group.subgroup([0, 1, 2]) as gone:
        still_works(gone)
    still_works(part)
    return [in_child(lambda: descriptors() + mappings())]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_child_holds_no_socket_and_maps_no_memory(topology: str) -> None:
    assert run(look_around_in_child, topology) == [["[]"]] * SIZE


def leave_by_os_exit() -> None:
    os._exit(0)


def leave_by_return() -> None:
    """The interpreter ends as it always does, with everything that was alive in it."""


def leave_by_sys_exit() -> None:
    atexit.register(len, ())
    sys.exit(0)


def drop_everything() -> None:
    gc.collect()
    sys.exit(0)


WAYS = {f.__name__: f for f in (leave_by_os_exit, leave_by_return, leave_by_sys_exit, drop_everything)}


def end_child(group: ProcessGroup, way: str) -> list[int]:
    """Fork twice, by hand and by multiprocessing, with groups in every state alive."""
    groups = [group.subgroup([0, 1, 2]) for _ in range(3)]
    for part in groups:
        still_works(part)
    groups[0].close()
    tensors = [part.empty(1000) for part in groups[1:]]
    future = group.recv(None, (group.rank + 1) % SIZE)
    codes = []
    child = quiet_fork()
    if child == 0:
        # As in a program of its own: no pipes and no frames of the fork server.
        try:
            if way == drop_everything.__name__:
                groups.clear()
                tensors.clear()
                del part, future
            WAYS[way]()
        except SystemExit as leaving:
            atexit._run_exitfuncs()
            os._exit(int(leaving.code or 0))
        finally:
            os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = multiprocessing.get_context("fork").Process(target=WAYS[way])
        process.start()
    process.join(PATIENCE)
    codes.append(-1 if process.exitcode is None else process.exitcode)
    group.send(torch.ones(1), (group.rank - 1) % SIZE).wait()
    future.wait()
    for part in groups[1:]:
        still_works(part)
    still_works(group)
    return codes


@pytest.mark.parametrize("way", WAYS)
def test_a_child_may_end_in_any_way(way: str) -> None:
    assert run(end_child, "hierarchical", way) == [[0, 0]] * SIZE


def fork_while_working(group: ProcessGroup) -> int:
    """One thread keeps collectives in flight, another one forks."""
    stop = threading.Event()
    children = []

    def fork() -> None:
        while not stop.is_set() and len(children) < FORKS:
            child = quiet_fork()
            if child == 0:
                try:
                    status = 0 if kind_of(group.barrier) == ForkedProcess.__name__ and not mappings() else 1
                    os._exit(status)
                finally:
                    os._exit(2)
            children.append(child)

    forking = threading.Thread(target=fork)
    forking.start()
    x = group.empty(200_000)
    end = time.monotonic() + PATIENCE
    going_on = True
    while going_on and time.monotonic() < end:
        futures = [group.all_reduce(t) for t in (x.fill_(1.0), torch.ones(50_000), torch.ones(1))]
        assert all(bool((future.wait() == group.size).all()) for future in futures)
        # All stop together, when all have forked enough.
        votes = group.all_gather(torch.tensor([forking.is_alive()])).wait()
        going_on = any(bool(vote) for vote in votes)
    stop.set()
    forking.join()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * len(children), codes
    return len(codes)


@pytest.mark.concurrency
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_forks_in_the_middle_of_collectives_disturb_nothing(topology: str) -> None:
    assert run(fork_while_working, topology) == [FORKS] * SIZE


def test_ranks_that_are_threads_survive_a_fork_too() -> None:
    def fn(group: ProcessGroup) -> str:
        still_works(group)
        text = in_child(lambda: [str(group.state), mappings()])
        still_works(group)
        return text

    with no_leaks():
        assert run_threads(fn, SIZE, timeout=PATIENCE) == ["['forked', []]"] * SIZE


def outlive(group: ProcessGroup) -> str:
    """Rank 0 leaves in order while its child goes on; nobody waits for the child."""
    if group.rank == 0:
        child = quiet_fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        group.store.set("child", str(child).encode())
    still_works(group)
    group.close()
    return group.state


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_group_closes_though_a_child_of_its_member_lives_on(topology: str) -> None:
    with no_leaks(), processes(outlive, SIZE, timeout=PATIENCE, **topology_options(topology, SIZE)) as ranks:
        child = int(ranks.store.get("child"))
        try:
            outcomes = ranks.join()
        finally:
            os.kill(child, signal.SIGKILL)
        assert [outcome.value for outcome in outcomes] == ["closed"] * SIZE


PROGRAM = """
import os, sys, torch, shoal
group = shoal.init(sys.argv[1], rank=int(sys.argv[2]), size=2, timeout=60)
x = group.empty(100_000).fill_(1.0)
part = group.subgroup([0, 1])
pending = group.recv(None, 1 - group.rank)
group.all_reduce(x).wait()
child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
part.all_reduce(x).wait()
group.send(x, 1 - group.rank).wait()
assert pending.wait()[0] == 4
group.barrier().wait()
"""


def test_a_child_may_end_as_every_program_does(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, f"file://{tmp_path}/meet"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=2 * PATIENCE)[0] for rank in ranks] == ["", ""]
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
