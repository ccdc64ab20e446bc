"""Names of workers, in a store that all read."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from shoal.common.process_identity import ProcessIdentity
from shoal.errors import UnknownWorker, UsageError
from shoal.net import Deadline
from shoal.rpc.connection.directory import Directory, Worker, checked_name, incarnation
from shoal.store import MemoryStore

PATIENCE = 20.0


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as store:
        yield store


@pytest.fixture
def names(store: MemoryStore) -> Directory:
    return Directory(store, "workers")


@pytest.fixture(scope="module")
def ended() -> str:
    """The identity of a process that has ended."""
    program = (
        "from shoal.common.process_identity import ProcessIdentity; print(ProcessIdentity.current().process)"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def worker(name: str, *, rank: int = -1, process: str | None = None, machine: str | None = None) -> Worker:
    there = ProcessIdentity.current()
    return Worker(
        name=name, incarnation=incarnation(), rank=rank, process=process or there.process,
        machine=machine or there.machine, host="h", unix="u", address="127.0.0.1", port=1,
    )  # fmt: skip


def test_a_name_belongs_to_the_first_that_claims_it(names: Directory) -> None:
    first, second = worker("ps"), worker("ps")
    names.claim(first)
    with pytest.raises(UsageError, match=r"name='ps' is not unique: process \d+ on this machine has joined"):
        names.claim(second)
    assert names.find("ps", Deadline(0.0), "me") == first
    names.withdraw(second)
    assert names.find("ps", Deadline(0.0), "me") == first, "only its holder gives a name back"
    names.withdraw(first)
    names.claim(second)
    assert names.workers() == [second]


def test_of_many_that_claim_a_name_at_once_one_gets_it(names: Directory) -> None:
    for _ in range(20):
        claims = [worker("one") for _ in range(8)]
        got: list[Worker] = []
        start = threading.Barrier(len(claims))

        def claim(mine: Worker, start: threading.Barrier = start, got: list[Worker] = got) -> None:
            start.wait(PATIENCE)
            try:
                names.claim(mine)
            except UsageError:
                return
            got.append(mine)

        threads = [threading.Thread(target=claim, args=(mine,)) for mine in claims]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        names.withdraw(got[0])


def test_a_holder_that_is_dead_is_replaced(names: Directory, ended: str) -> None:
    dead, new = worker("ps", process=ended), worker("ps")
    names.claim(dead)
    assert names.workers() == []
    with pytest.raises(UnknownWorker, match=r"'ps' \(process \d+\) has ended and was not replaced"):
        names.find("ps", Deadline(0.05), "me")
    names.claim(new)
    assert names.find("ps", Deadline(0.0), "me") == new


def test_nobody_judges_a_process_of_another_machine(names: Directory, ended: str) -> None:
    names.claim(worker("ps", process=ended, machine="far/away"))
    with pytest.raises(UsageError, match=r"process \d+ on far has joined"):
        names.claim(worker("ps"))


def test_a_holder_that_leaves_while_it_is_judged_is_replaced(
    names: Directory, ended: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.claim(worker("ps", process=ended))
    judge = Worker.is_dead

    def leaves(self: Worker) -> bool:
        store.delete("rpc/workers/name/ps")
        return judge(self)

    monkeypatch.setattr(Worker, "is_dead", leaves)
    new = worker("ps")
    names.claim(new)
    assert names.look("ps") == new


def test_an_unknown_name_lists_those_that_are_there(names: Directory, ended: str) -> None:
    with pytest.raises(
        UnknownWorker, match=r"'me': no worker has joined as 'ps', or it has left; there are no workers"
    ):
        names.find("ps", Deadline(0.0), "me")
    for name in ("b", "a"):
        names.claim(worker(name))
    names.claim(worker("dead", process=ended))
    with pytest.raises(
        UnknownWorker, match=r"no worker has joined as 'ps', or it has left; there are 'a', 'b'$"
    ):
        names.find("ps", Deadline(0.0), "me")


def test_the_time_that_was_given_is_named_and_not_what_was_left_of_it(names: Directory) -> None:
    over = Deadline(0.05)
    over.at -= 1.0
    with pytest.raises(UnknownWorker, match=r"no worker has joined as 'ps' within 0\.05 s"):
        names.find("ps", over, "me")
    with pytest.raises(UnknownWorker, match=r"rank 4 has not joined within 0\.05 s"):
        names.name_of_rank(4, over, "me")


def test_who_looks_waits_for_a_name(names: Directory) -> None:
    late = worker("late", rank=3)
    threading.Timer(0.05, names.claim, [late]).start()
    assert names.find("late", Deadline(PATIENCE), "me") == late
    assert names.name_of_rank(3, Deadline(PATIENCE), "me") == "late"
    with pytest.raises(UnknownWorker, match=r"rank 4 has not joined; there are 'late'"):
        names.name_of_rank(4, Deadline(0.0), "me")


def test_namespaces_do_not_meet(names: Directory, store: MemoryStore) -> None:
    names.claim(worker("ps"))
    assert Directory(store, "others").workers() == []


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257, None, 3])
def test_what_cannot_name_a_worker_is_refused(name: object) -> None:
    with pytest.raises(UsageError, match="expected 1 to 256 bytes of printable text"):
        checked_name(name)


def test_a_name_may_have_any_letters(names: Directory) -> None:
    odd = worker(checked_name("käse/🧀 %s"))
    names.claim(odd)
    assert names.find(odd.name, Deadline(0.0), "me") == odd
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(odd), type=Worker) == odd
