"""What a forked child may do with its parent's groups: nothing, and it harms nobody."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable

import pytest
import torch

from shoal.errors import ForkedProcess
from shoal.group import ProcessGroup
from shoal.testing import run_threads

from .null_backend import NullBackend, null_group


def in_forked_child(fn: Callable[[], None]) -> None:
    """Run ``fn`` in a forked child and fail with its traceback if it raised."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads: that is the point
        child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            fn()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        report = pipe.read().decode()
    os.waitpid(child, 0)
    assert report == ""


def test_a_forked_child_is_told_what_to_do_and_each_backend_drops_what_it_holds_once() -> None:
    group, channel = null_group()
    part = group.subgroup([1])

    def child() -> None:
        for own in (group, part):
            assert own.state == "forked"
            with pytest.raises(ForkedProcess, match="spawn"):
                own.barrier()
        assert isinstance(group._backend, NullBackend)
        assert group._backend.forks == 1
        group.close()
        assert channel.closed_within == []

    in_forked_child(child)
    assert group.state == part.state == "open"
    group.world.close(1.0)


def test_a_fork_in_the_middle_of_a_job_does_not_disturb_it() -> None:
    def work(group: ProcessGroup) -> None:
        assert group.all_reduce(torch.ones(1)).wait().item() == 2.0
        if group.rank == 0:

            def child() -> None:
                with pytest.raises(ForkedProcess):
                    group.all_reduce(torch.ones(1))
                group.close()

            in_forked_child(child)
        for _ in range(100):
            assert group.all_reduce(torch.ones(1)).wait().item() == 2.0

    run_threads(work, 2, timeout=30)


def test_a_closed_group_stays_closed_in_a_child() -> None:
    group, _ = null_group()
    group.close()

    def child() -> None:
        assert group.state == "closed"

    in_forked_child(child)
