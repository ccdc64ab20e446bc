"""Meeting at tcp:// and file:// URLs, and at schemes of one's own."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

import pytest
import torch

import shoal
from shoal import (
    AuthenticationError,
    ConfigurationError,
    Membership,
    MemoryStore,
    RendezvousError,
    RendezvousTimeout,
    Store,
    TCPStoreServer,
    UsageError,
    WireError,
    register_store,
)
from shoal.rendezvous import (
    Request,
    Venue,
    job_record,
    register_rendezvous,
    rendezvous,
    schemes,
    unregister_rendezvous,
    user_secret,
)
from shoal.store import open_store
from shoal.store import urls as opener
from shoal.testing import no_leaks
from tests.support.dictionary_store import Dictionary, dictionary_store
from tests.support.ports import free_port

from .together import all_well, release_all, rendezvous_at, request, together, unknown_host


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    """As `shoal store --size 2` starts it."""
    with TCPStoreServer(records=job_record(2), secret=b"s") as server:
        yield server


@pytest.fixture(name="free_port")
def _free_port() -> int:
    return free_port()


def _meet_all(url: str, size: int, **how: Any) -> list[Membership]:
    return all_well(
        together(*(lambda rank=rank: rendezvous_at(url, rank, size, **how) for rank in range(size)))
    )


# -- tcp -------------------------------------------------------------------------------------------


def test_a_process_needs_the_address_and_the_secret_alone(server: TCPStoreServer) -> None:
    members = all_well(together(*[lambda: rendezvous_at(server.url, secret=b"s")] * 2))
    assert sorted(member.rank for member in members) == [0, 1]
    assert {member.secret for member in members} == {b"s"}
    release_all(members)


def test_another_secret_is_refused(server: TCPStoreServer) -> None:
    with pytest.raises(AuthenticationError):
        rendezvous_at(server.url, secret=b"another")


def test_rank_0_serves_the_store_where_nobody_does(free_port: int) -> None:
    with no_leaks():
        members = _meet_all(f"tcp://127.0.0.1:{free_port}", 3)
        release_all(members)


def test_the_first_process_serves_the_store_where_ranks_are_those_of_arrival(free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    with no_leaks():
        members = all_well(together(*[lambda: rendezvous_at(url, None, 3)] * 3))
        assert sorted(member.rank for member in members) == [0, 1, 2]
        release_all(members)


def test_rank_0_does_not_serve_the_store_where_somebody_does(server: TCPStoreServer) -> None:
    members = _meet_all(server.url, 2, secret=b"s")
    release_all(members)
    assert server.clients >= 0
    members = _meet_all(server.url, 2, secret=b"s")  # it is still there
    release_all(members)


def test_rank_0_serves_until_the_others_are_done(free_port: int) -> None:
    first, second = _meet_all(f"tcp://127.0.0.1:{free_port}", 2)

    def late() -> None:
        second.store.wait(["first is closing"])
        assert second.store.get("x") == b"1"
        second.release(10.0)

    def early() -> None:
        first.store.set("x", b"1")
        first.store.set("first is closing", b"")
        first.release(10.0)

    assert together(early, late) == [None, None]


def test_when_rank_0_gives_up_the_others_hear_why(free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    with no_leaks():
        results = together(
            lambda: rendezvous_at(url, 0, 3, timeout=1.0),
            lambda: rendezvous_at(url, 1, 3, timeout=60.0),
            timeout=20.0,
        )
    for result in results:
        assert isinstance(result, RendezvousTimeout)
        assert "waited 1 s for rank" in str(result)
        assert "2 did not come" in str(result)


def test_when_rank_0_comes_with_another_size_both_sides_hear_it(free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    results = together(
        lambda: rendezvous_at(url, 0, 2, timeout=2.0), lambda: rendezvous_at(url, 1, 3, timeout=2.0)
    )
    for result in results:
        assert isinstance(result, RendezvousError)
        assert "every rank must be given the same size" in str(result)


def test_rank_0_does_not_wait_for_the_dead(free_port: int) -> None:
    first, second = _meet_all(f"tcp://127.0.0.1:{free_port}", 2)
    second.store.close()  # as the kernel does for a process that is killed
    assert together(lambda: first.release(60.0), timeout=20.0) == [None]


def test_rank_0_serves_as_soon_as_a_passing_connection_leaves_the_port(free_port: int) -> None:
    """The kernel gives connections their own ends from a range that a user's port may be in."""
    url = f"tcp://127.0.0.1:{free_port}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as passing, no_leaks():
        passing.bind(("127.0.0.1", free_port))
        passing.connect(listener.getsockname())
        (refused,) = together(lambda: rendezvous_at(url, 0, 2, timeout=0.3))
        assert isinstance(refused, RendezvousTimeout)
        assert "rank 0 cannot serve the store" in str(refused)
        assert "choose a port outside of" in str(refused)
        other, _ = listener.accept()
        other.close()  # first, so that nothing of the connection lingers at the port

        def leave() -> None:
            assert passing.recv(1) == b""
            time.sleep(0.2)
            passing.close()

        members = together(lambda: rendezvous_at(url, 0, 2), lambda: rendezvous_at(url, 1, 2), leave)[:2]
        assert together(*(lambda member=member: member.release(10.0) for member in members)) == [None] * 2


@pytest.mark.concurrency
def test_one_job_after_another_at_a_port_that_rank_0_serves(free_port: int) -> None:
    def rounds(rank: int) -> list[str]:
        seen = []
        for number in range(10):
            member = rendezvous_at(f"tcp://127.0.0.1:{free_port}", rank, 2)
            seen.append(member.store.compare_set("round", b"", str(number)).decode())
            member.release(10.0)
        return seen

    with no_leaks():
        results = together(lambda: rounds(0), lambda: rounds(1))
        assert results == [[str(number) for number in range(10)]] * 2


@pytest.mark.parametrize("rank", [0, None])
def test_a_process_serves_where_a_server_ends_while_it_connects(rank: int | None, free_port: int) -> None:
    """The server is that of an earlier job. It listened when the process tried to start its own."""
    with socket.create_server(("127.0.0.1", free_port)) as ending, no_leaks():

        def end() -> None:
            connection, _ = ending.accept()
            ending.close()
            connection.close()

        ended, member = together(end, lambda: rendezvous_at(f"tcp://127.0.0.1:{free_port}", rank, 1))
        assert ended is None
        release_all(all_well([member]))


def test_a_store_that_never_starts_is_named(free_port: int) -> None:
    with pytest.raises(
        RendezvousTimeout, match=f"the process that starts the store, is late or has ended.*{free_port}"
    ) as caught:
        rendezvous_at(f"tcp://127.0.0.1:{free_port}", 1, 2, timeout=0.2)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1, "the causes below say nothing that the message does not"


def test_rank_0_without_a_size_is_told_that_it_starts_no_store(free_port: int) -> None:
    with pytest.raises(RendezvousTimeout, match=r"\(rank 0 does, if it is given size=\) is late"):
        rendezvous_at(f"tcp://127.0.0.1:{free_port}", 0, None, timeout=0.2)


def test_without_a_secret_only_loopback_will_do() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"beyond this host and the job has no secret: .*SHOAL_SECRET=\$\(openssl",
    ):
        rendezvous_at("tcp://192.0.2.7:29400", 1, 2)


def test_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "resolve", unknown_host)
    with pytest.raises(RendezvousError, match=r"host 'no\.such\.host\.invalid' of the store is unknown"):
        rendezvous_at("tcp://no.such.host.invalid:29400", 1, 2)


@pytest.mark.parametrize(
    "url", ["tcp://host", "tcp://:29400", "tcp://host:0", "tcp://host:99999", "tcp://h:1/path"]
)
def test_what_is_no_host_and_port_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="tcp://"):
        rendezvous_at(url, 0, 1)


# -- file ------------------------------------------------------------------------------------------


def test_ranks_meet_in_a_file_and_agree_on_a_secret(tmp_path: Path) -> None:
    for size in (2, 3):
        members = _meet_all(f"file://{tmp_path}/a%20file", size)
        assert {member.secret for member in members} == {members[0].secret}
        assert members[0].secret
        release_all(members)
    assert (tmp_path / "a file").exists()


def test_a_secret_that_was_given_is_not_replaced(tmp_path: Path) -> None:
    members = _meet_all(f"file://{tmp_path}/file", 2, secret=b"given")
    assert {member.secret for member in members} == {b"given"}
    release_all(members)


@pytest.mark.parametrize("url", ["file://relative/path", "file:relative", "file://host/path"])
def test_what_is_no_absolute_path_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        rendezvous(url, rank=0, size=1)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        rendezvous_at(f"file://{tmp_path}/no/file", 0, 1)


# -- schemes of one's own --------------------------------------------------------------------------


def test_a_scheme_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def handler(request: Request) -> Venue:
        assert request.url.netloc == "here"
        return Venue(store.clone(), request.rank, request.size)

    register_rendezvous("memory", handler)
    try:
        members = _meet_all("memory://here", 2)
        release_all(members)
        with pytest.raises(UsageError, match="'memory' has a handler already"):
            register_rendezvous("memory", handler)
    finally:
        unregister_rendezvous("memory")
    with pytest.raises(UsageError, match="registered for memory://; known are env://, etcd://, etcds"):
        rendezvous("memory://here")


@pytest.fixture
def dictionary(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Registers ``dictionary://name``; the secrets with which its opener was called."""
    monkeypatch.setattr(opener, "_openers", dict(opener._openers))
    monkeypatch.setattr(Dictionary, "tables", {})
    secrets: list[bytes] = []

    def open_dictionary(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
        secrets.append(secret)
        return dictionary_store(url.netloc, timeout)

    register_store("dictionary", open_dictionary)
    return secrets


def test_a_registered_store_is_a_place_to_meet(dictionary: list[bytes]) -> None:
    members = _meet_all("dictionary://here", 3, secret=b"given")
    assert {member.secret for member in members} == {b"given"}
    assert dictionary == [b"given"] * 3
    members[0].store.set("x", b"1")
    assert members[2].store.get("x") == b"1"
    release_all(members)
    with open_store("dictionary://here") as store:  # the same one
        assert store.num_keys() > 0
    assert open_store("dictionary://there").num_keys() == 0


def test_in_a_registered_store_ranks_may_come_as_they_arrive(dictionary: list[bytes]) -> None:
    with open_store("dictionary://here") as store:
        store.multi_set(*zip(*job_record(2).items(), strict=True))
    members = all_well(together(*[lambda: rendezvous_at("dictionary://here")] * 2))
    assert sorted(member.rank for member in members) == [0, 1]
    assert members[0].secret == members[1].secret == user_secret()
    release_all(members)


def test_launchers_can_name_a_registered_store(dictionary: list[bytes]) -> None:
    def meet(rank: int) -> Membership:
        variables = {"SHOAL_STORE": "dictionary://here", "SHOAL_RANK": str(rank), "SHOAL_SIZE": "2"}
        return rendezvous_at("env://", environ=variables)

    members = all_well(together(lambda: meet(0), lambda: meet(1)))
    assert [(member.rank, member.size) for member in members] == [(0, 2), (1, 2)]
    release_all(members)


def test_a_group_stands_on_a_registered_store(dictionary: list[bytes], store_backend: str) -> None:
    def rank(number: int) -> float:
        with shoal.init("dictionary://here", rank=number, size=2, backend=store_backend, timeout=20) as group:
            return group.all_reduce(torch.ones(1)).wait().item()

    assert together(lambda: rank(0), lambda: rank(1)) == [2.0, 2.0]


def test_a_handler_goes_before_a_store_of_the_same_scheme(dictionary: list[bytes]) -> None:
    register_rendezvous("dictionary", lambda request: Venue(MemoryStore(), 0, 1))
    try:
        assert rendezvous_at("dictionary://here").size == 1
    finally:
        unregister_rendezvous("dictionary")
    assert dictionary == []


def test_an_unknown_scheme_is_told_which_handlers_and_stores_there_are(dictionary: list[bytes]) -> None:
    known = "dictionary://, env://, etcd://, etcds://, file://, mpi://, redis://, rediss://, tcp://"
    with pytest.raises(UsageError, match=f"for carrier://; known are {known}"):
        rendezvous("carrier://roof")


def test_a_malformed_scheme_is_refused() -> None:
    with pytest.raises(UsageError, match="store scheme 'My Scheme'"):
        register_store("My Scheme", lambda url, *, secret, timeout: MemoryStore(timeout))
    with pytest.raises(UsageError, match="rendezvous scheme 'My Scheme'"):
        register_rendezvous("My Scheme", lambda request: Venue(MemoryStore()))


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": 5}, "rendezvous url 5: expected a str"),
        ({"secret": 5}, "secret: expected str or bytes, not int"),
        ({"timeout": "10"}, "timeout='10': expected a number of seconds"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rendezvous(**arguments)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (-1, 2, "rank=-1: expected a whole number from 0 to 1"),
        (2, 2, "rank=2: expected a whole number from 0 to 1"),
        (0, 0, "size=0: expected a whole number from 1"),
        (0, 2.0, "size=2.0"),
        ("0", 2, "rank='0'"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(rank: Any, size: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rendezvous("tcp://127.0.0.1:1", rank=rank, size=size)


@pytest.mark.parametrize("url", ["", "localhost:29400", "tcp:/x", "tcp://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="rendezvous url"):
        rendezvous(url, rank=0, size=1)


def test_the_interface_must_be_ours() -> None:
    with pytest.raises(
        ConfigurationError, match=r"SHOAL_INTERFACE='192\.0\.2\.7' is not an address of this host"
    ):
        rendezvous_at("env://", environ={"SHOAL_INTERFACE": "192.0.2.7"})
    assert rendezvous_at("env://", environ={"SHOAL_INTERFACE": "localhost"}).interface == "127.0.0.1"


def test_the_host_id_can_be_overridden() -> None:
    assert rendezvous_at("env://", environ={"SHOAL_HOST_ID": "a"}).host == "a"


def test_a_server_that_is_no_store_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rendezvous.membership._SERVER_HANDOVER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
                    client.recv(1024)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WireError, match="not speak"):
            rendezvous_at(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1, 2)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_ranks_of_a_large_job_do_not_connect_all_at_one_moment() -> None:
    def pause(rank: int | None, size: int, timeout: float = 300.0) -> float:
        return schemes._before_first_try(request("tcp://host:1", rank, size, timeout=timeout))

    assert [pause(rank, 64) for rank in (0, 63, None)] == [0.0] * 3
    assert [pause(rank, 10_000) for rank in (0, 5_000, 9_999)] == pytest.approx([0.0, 2.0, 4.0], abs=0.01)
    assert 0.0 <= pause(None, 10_000) <= 4.0
    assert pause(99_999, 100_000, timeout=4.0) <= 1.0
