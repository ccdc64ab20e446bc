"""What the stores of one job on other servers share in a process, without a server."""

from __future__ import annotations

import contextlib
import threading

import pytest

from shoal.errors import AuthenticationError, StoreError
from shoal.net import Deadline
from shoal.store.external import job as outside_job
from shoal.store.external.job import OutsideJob, WriteChannel
from tests.support.waiting import until


class Imagined(OutsideJob[WriteChannel]):
    """A job whose server answers what ``answers`` say, and then that the job has ended."""

    def __init__(self, *answers: bool | Exception) -> None:
        super().__init__("name", "nowhere")
        self.answers = [*answers]
        self.asked = threading.Semaphore(0)
        self.left: list[str] | None = None
        self.disconnected = False

    def disconnect(self) -> None:
        self.disconnected = True

    def _new_line(self, ident: str) -> WriteChannel:
        return WriteChannel(ident)

    def _keep_alive(self, deadline: Deadline) -> bool:
        self.asked.release()
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _lives(self, deadline: Deadline) -> bool:
        return bool(self.answers)

    def _anew(self, deadline: Deadline) -> Imagined:
        return Imagined(True)

    def _leave(self, lines: list[str], deadline: Deadline) -> None:
        self.left = lines
        raise StoreError("the server has gone")


def test_errors_do_not_keep_it_from_being_kept_alive_and_are_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outside_job, "KEEP_ALIVE_INTERVAL_S", 0.02)
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

    monkeypatch.setattr(job._ended, "wait", wait)
    job._keep()
    assert pauses == [20.0, 20.0, 1.0, 20.0]


def test_the_last_store_that_is_closed_leaves_and_disconnects_whatever_the_server_says() -> None:
    job = Imagined(True)
    job.acquire()
    job.acquire()
    with job.line() as first, job.line():
        first_name = first.name
    with job.line() as again:
        assert again.number in (1, 2)
    job.release()
    assert job.left is None
    job.release()
    assert job.left is not None
    assert first_name in job.left
    assert len(job.left) == 2
    assert job.disconnected
    assert not job._keeper.is_alive()


def test_a_line_carries_one_write_at_a_time_with_numbers_of_its_own() -> None:
    job = Imagined()
    with job.line() as first, job.line() as second:
        assert first.name != second.name
        assert (first.number, second.number) == (1, 1)
    numbers = []
    for _ in range(3):
        with job.line() as line:
            numbers.append((line.name, line.number))
    assert len({*numbers}) == 3


@pytest.mark.parametrize("how", ["an error", "a copy"])
def test_a_line_of_which_a_copy_may_be_on_its_way_is_used_no_more_and_stays(how: str) -> None:
    job = Imagined(True)
    job.acquire()
    with contextlib.suppress(StoreError), job.line() as line:
        if how == "an error":
            raise StoreError("")
        line.doubt()
    with job.line() as other:
        assert other.name != line.name
    job.release()
    assert job.left == [other.name]


def test_a_job_that_has_ended_is_taken_up_anew() -> None:
    living, ended = Imagined(True), Imagined()
    assert living.again(Deadline(1.0)) is living
    assert ended.again(Deadline(1.0)) is not ended
