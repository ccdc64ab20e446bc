"""What the stores of one job on other servers share in a process, without a server."""

from __future__ import annotations

import contextlib
import threading

import pytest

from shoal.errors import AuthenticationError, StoreError
from shoal.net import Deadline
from shoal.store.external import job as external_job
from shoal.store.external.job import ExternalJob, WriteChannel
from tests.support.waiting import until


class NoServer:
    """Connections to no server."""

    def __init__(self) -> None:
        self.closed = False

    def clone(self) -> NoServer:
        return NoServer()

    def close(self) -> None:
        self.closed = True


class Imagined(ExternalJob[NoServer, WriteChannel]):
    """A job whose server answers what ``answers`` say, and then that the job has ended."""

    def __init__(self, *answers: bool | Exception) -> None:
        super().__init__(NoServer(), "name", Deadline(1.0))
        self.answers = [*answers]
        self.asked = threading.Semaphore(0)
        self.left: list[str] | None = None

    def _join(self, deadline: Deadline) -> None:
        self.joined = True

    def _new_channel(self, ident: str) -> WriteChannel:
        return WriteChannel(ident)

    def _keep_alive(self, deadline: Deadline) -> bool:
        self.asked.release()
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _exists(self, deadline: Deadline) -> bool:
        return bool(self.answers)

    def _leave(self, lines: list[str], deadline: Deadline) -> None:
        self.left = lines
        raise StoreError("the server has gone")


def test_errors_do_not_keep_it_from_being_kept_alive_and_are_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_job, "KEEP_ALIVE_INTERVAL_S", 0.02)
    job = Imagined(True, StoreError(""), AuthenticationError(""), True)
    job.acquire()
    for _ in range(5):
        assert job.asked.acquire(timeout=60)
    until(lambda: not job._keeper.is_alive())  # it has heard that the job has ended
    job.release()


def test_after_an_error_the_keys_have_time_for_further_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    job, pauses = Imagined(True, StoreError(""), True), []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(job._closing, "wait", wait)
    job._keep()
    assert pauses == [20.0, 20.0, 1.0, 20.0]


def test_the_last_store_that_is_closed_leaves_and_disconnects_whatever_the_server_says() -> None:
    job = Imagined(True)
    job.acquire()
    job.acquire()
    with job.channel() as first, job.channel():
        first_name = first.name
    with job.channel() as again:
        assert again.number in (1, 2)
    job.release()
    assert job.left is None
    job.release()
    assert job.left is not None
    assert first_name in job.left
    assert len(job.left) == 2
    assert job.client.closed
    assert not job._keeper.is_alive()


def test_a_line_carries_one_write_at_a_time_with_numbers_of_its_own() -> None:
    job = Imagined()
    with job.channel() as first, job.channel() as second:
        assert first.name != second.name
        assert (first.number, second.number) == (1, 1)
    numbers = []
    for _ in range(3):
        with job.channel() as channel:
            numbers.append((channel.name, channel.number))
    assert len({*numbers}) == 3


@pytest.mark.parametrize("how", ["an error", "a copy"])
def test_a_line_of_which_a_copy_may_be_on_its_way_is_used_no_more_and_stays(how: str) -> None:
    job = Imagined(True)
    job.acquire()
    with contextlib.suppress(StoreError), job.channel() as channel:
        if how == "an error":
            raise StoreError("")
        channel.mark_unclear()
    with job.channel() as other:
        assert other.name != channel.name
    job.release()
    assert job.left == [other.name]


def test_a_job_that_has_ended_is_taken_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    living, ended = Imagined(True), Imagined()
    assert living.current(Deadline(1.0)) is living
    monkeypatch.setattr(Imagined, "__init__", ExternalJob.__init__)
    later = ended.current(Deadline(1.0))
    assert later is not ended
    assert later.client is not ended.client
