"""What goes wrong silently, late or without a cause elsewhere: a right result or a clear error on every rank.

Each section is one of the faults that users of other stacks report (docs/errors.md says what to do); those of
collectives run over shared memory, over the network, and over hosts of several ranks.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

import shoal
from shoal import CollectiveMismatch, GroupClosed, OperationTimeout, ProcessGroup, ReduceOp
from shoal.errors import AuthenticationError, GroupError, StoreError, StoreTimeout, UsageError
from shoal.rendezvous import job_record
from shoal.store import TCPStore, TCPStoreServer
from shoal.testing import no_leaks, run_threads
from tests.support.topologies import TOPOLOGIES, topology_options

from .ranks import PATIENCE

SECRET = "a secret of this test"


@pytest.fixture(params=TOPOLOGIES)
def on_three_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_threads`` over one of the topologies; it fails if anything is left behind."""

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        with no_leaks():
            return run_threads(fn, 3, *args, timeout=PATIENCE, **topology_options(request.param, 3))

    return run


# -- ranks that do not agree -----------------------------------------------------------------------


def disagree(group: ProcessGroup, call: Callable[[ProcessGroup], Any]) -> str:
    """Every rank gets the error, the group is broken after it, and says the same again."""
    group.barrier().wait()

    def call_and_meet() -> None:
        call(group)
        group.barrier().wait()  # who had no reason to wait for the others hears it here

    with pytest.raises(CollectiveMismatch) as caught:
        call_and_meet()
    assert group.state == "broken"
    with pytest.raises(CollectiveMismatch):
        group.barrier()
    return str(caught.value)


def texts_of(on_ranks: Callable[..., list[str]], call: Callable[[ProcessGroup], Any]) -> list[str]:
    """The messages of ranks that disagree: each has all calls, unless a rank stands still for 3 s."""
    for _ in range(5):
        texts = on_ranks(disagree, call)
        if not any("has not called it yet" in text or "did not answer" in text for text in texts):
            break
    return texts


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("sizes", [(4, 5), (1_000_000, 2_000_000)])
def test_sizes_that_differ_are_told_to_every_rank(
    on_three_ranks: Callable[..., list[str]], sizes: tuple[int, int], registered: bool
) -> None:
    def call(group: ProcessGroup) -> None:
        n = sizes[group.rank == 1]
        x = group.empty(n).fill_(1.0) if registered else torch.ones(n)
        group.all_reduce(x).wait()

    for text in texts_of(on_three_ranks, call):
        assert f"rank 0: all_reduce(float32[{sizes[0]}], op=SUM)" in text
        assert f"rank 1: all_reduce(float32[{sizes[1]}], op=SUM)" in text


def test_dtypes_that_differ_are_told_to_every_rank(on_three_ranks: Callable[..., list[str]]) -> None:
    def call(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(8, dtype=torch.int32 if group.rank == 2 else torch.float32)).wait()

    for text in texts_of(on_three_ranks, call):
        assert "rank 0: all_reduce(float32[8], op=SUM)" in text
        assert "rank 2: all_reduce(int32[8], op=SUM)" in text


@pytest.mark.parametrize("other", ["broadcast", "barrier", "all_gather", "another root", "another reduction"])
def test_operations_that_differ_are_told_to_every_rank(
    on_three_ranks: Callable[..., list[str]], other: str
) -> None:
    def call(group: ProcessGroup) -> None:
        x = torch.ones(100)
        odd = group.rank == 1
        if other == "broadcast" and odd:
            group.broadcast(x, 1).wait()
        elif other == "barrier" and odd:
            group.barrier().wait()
        elif other == "all_gather" and odd:
            group.all_gather_single(torch.empty(300), x).wait()
        elif other == "another root":
            group.reduce(x, 1 if odd else 0).wait()
        else:
            group.all_reduce(x, "max" if odd else "sum").wait()

    for text in on_three_ranks(disagree, call):
        assert "called different things as operation" in text
        for rank in range(3):
            assert f"rank {rank}: " in text


def test_a_message_that_does_not_fit_is_told_to_both() -> None:
    def fn(group: ProcessGroup) -> str:
        if group.rank == 0:
            group.send(torch.ones(5), 1, tag=3).wait()  # it need not wait for the receiver
        with pytest.raises(CollectiveMismatch) as caught:
            (group.barrier() if group.rank == 0 else group.recv(torch.empty(4), 0, tag=3)).wait()
        return str(caught.value)

    for transport in ("shm", "tcp"):
        for text in run_threads(fn, 2, timeout=PATIENCE, transport=transport):
            assert "rank 0: send(float32[5])" in text
            assert "rank 1: recv(float32[4])" in text


# -- ranks that do not come ------------------------------------------------------------------------


def test_an_absent_rank_is_named_with_the_operation_it_missed(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    reported, here = threading.Barrier(3), threading.Barrier(2)

    def fn(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == 1:
            reported.wait(PATIENCE)
            with pytest.raises(
                OperationTimeout, match=r"(never arrived|do not answer at all): (0, )?1.*reported by rank"
            ):
                group.barrier().wait()
            return
        here.wait(PATIENCE)  # or the later one would be missed, too
        # Whoever asks first tells the other, so that both may have the same timeout.
        with pytest.raises(OperationTimeout) as caught:
            group.all_reduce(torch.ones(4), timeout=1.5).wait()
        reported.wait(PATIENCE)
        assert 1 in caught.value.ranks  # others too, if they stood still meanwhile
        assert str(caught.value).startswith(
            f"all_reduce (operation 1) on rank {group.rank} of group 'world' ("
        )
        assert "0) did not finish within its timeout of 1.5 s; " in str(caught.value)
        assert re.search(r"(never arrived|do not answer at all): (0, )?1", str(caught.value))
        assert group.state == "broken"

    on_three_ranks(fn)


def test_every_operation_takes_a_timeout_of_its_own(on_three_ranks: Callable[..., list[Any]]) -> None:
    reported = threading.Barrier(3)

    def fn(group: ProcessGroup, start: Callable[[ProcessGroup], Any]) -> None:
        if group.rank == 0:
            with pytest.raises(OperationTimeout, match=r"within its timeout of 0\.05 s"):
                start(group).wait()
        reported.wait(PATIENCE)

    x, out = torch.ones(3), torch.empty(9)
    starts: list[Callable[[ProcessGroup], Any]] = [
        lambda g: g.all_reduce(x.clone(), timeout=0.05),
        lambda g: g.all_gather_single(out.clone(), x, timeout=0.05),
        lambda g: g.barrier(timeout=0.05),
        lambda g: g.recv(None, 1, timeout=0.05),
    ]
    for start in starts:
        on_three_ranks(fn, start)


def test_uneven_numbers_of_steps_are_an_error_that_names_who_left(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    def fn(group: ProcessGroup) -> None:
        for _ in range(5 if group.rank == 2 else 8):
            group.all_reduce(torch.ones(10)).wait()

    def check(group: ProcessGroup) -> None:
        if group.rank == 2:
            fn(group)
            return
        with pytest.raises(GroupClosed, match="rank 2 has closed the group and left"):
            fn(group)

    on_three_ranks(check)


# -- data that others refuse or spoil --------------------------------------------------------------


def test_tensors_that_are_not_contiguous_give_the_right_answer(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    def fn(group: ProcessGroup) -> None:
        whole = torch.arange(24.0).reshape(4, 6)
        for view in (lambda t: t.T, lambda t: t[:, ::2], lambda t: t[1:3, 2:5], lambda t: t.T[::2]):
            base = whole.clone()
            untouched = base.clone()
            x = view(base)
            group.all_reduce(x).wait()
            view(untouched).mul_(3)
            assert torch.equal(base, untouched)
            received = torch.zeros_like(whole)
            group.broadcast(view(base if group.rank == 0 else received), 0).wait()
            assert group.rank == 0 or torch.equal(view(received), view(base))

    on_three_ranks(fn)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_integers_of_every_width_are_reduced_and_their_average_truncates(
    on_three_ranks: Callable[..., list[Any]], dtype: torch.dtype
) -> None:
    def fn(group: ProcessGroup) -> None:
        mine = torch.tensor([group.rank, 7, 100], dtype=torch.int64).to(dtype)
        assert group.all_reduce(mine.clone()).wait().tolist() == [3, 21, 300]
        assert group.all_reduce(mine.clone(), "max").wait().tolist() == [2, 7, 100]
        odd = torch.tensor([group.rank, group.rank * group.rank], dtype=torch.int64).to(dtype)
        assert group.all_reduce(odd, "avg").wait().tolist() == [1, 1]  # 3 / 3 and 5 / 3

    on_three_ranks(fn)


def test_float8_is_copied_and_a_factor_is_applied_before_the_sum(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    def fn(group: ProcessGroup) -> None:
        x = torch.full((5,), 1.5 + group.rank).to(torch.float8_e4m3fn)
        gathered = group.all_gather(x).wait()
        assert [t.float()[4].item() for t in gathered] == [1.5, 2.5, 3.5]
        y = torch.full((4,), 2.0)
        assert group.all_reduce(y, ReduceOp.premul_sum(0.25)).wait().tolist() == [1.5] * 4

    on_three_ranks(fn)


def test_parts_may_differ_in_size(on_three_ranks: Callable[..., list[Any]]) -> None:
    def fn(group: ProcessGroup) -> None:
        out = [torch.empty(n) for n in (1, 5, 0)]
        gathered = group.all_gather(out, torch.full((len(out[group.rank]),), float(group.rank))).wait()
        assert [t.tolist() for t in gathered] == [[0.0], [1.0] * 5, []]
        parts = [torch.ones(n) for n in (1, 5, 0)]
        mine = torch.empty(len(parts[group.rank]))
        assert group.reduce_scatter(mine, parts).wait().tolist() == [3.0] * len(mine)

    on_three_ranks(fn)


def test_collectives_work_in_inference_mode_and_in_its_callbacks(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    def fn(group: ProcessGroup) -> None:
        with torch.inference_mode():
            x = torch.ones(10)
            assert group.all_reduce(x).wait().tolist() == [3.0] * 10
            again = group.all_reduce(x).then(lambda f: group.all_reduce(f.value()).wait())
            assert again.wait().tolist() == [27.0] * 10

    on_three_ranks(fn)


# -- stores ----------------------------------------------------------------------------------------


def rendezvous_at(server: TCPStoreServer, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Two ranks, as threads, of a job whose store ``server`` hosts."""
    results: list[Any] = [None, None]

    def rank(number: int) -> None:
        url = f"tcp://{server.host}:{server.port}"
        try:
            with shoal.init(url, rank=number, size=2, secret=SECRET, timeout=PATIENCE) as group:
                results[number] = fn(group)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def server_of_two() -> TCPStoreServer:
    return TCPStoreServer(secret=SECRET.encode(), records=job_record(2))


def test_groups_go_on_when_the_store_is_gone() -> None:
    gone, met = threading.Event(), threading.Barrier(3)

    def fn(group: ProcessGroup) -> float:
        met.wait(PATIENCE)
        assert gone.wait(PATIENCE)
        with pytest.raises(StoreError):
            group.store.set("key", b"value")
        part = group.split(0)
        assert part is not None
        with part:
            part.all_reduce(torch.ones(1)).wait()
        return group.all_reduce(torch.ones(1)).wait().item()

    def take_away(server: TCPStoreServer) -> None:
        met.wait(PATIENCE)
        server.close()
        gone.set()

    with no_leaks(), server_of_two() as server:
        taking = threading.Thread(target=take_away, args=(server,))
        taking.start()
        assert rendezvous_at(server, fn) == [2.0, 2.0]
        taking.join()


def test_a_get_that_waits_in_vain_names_the_key() -> None:
    def fn(group: ProcessGroup) -> None:
        with pytest.raises(StoreTimeout, match="nobody sets this"):
            group.store.get("nobody sets this", timeout=0.05)

    with server_of_two() as server:
        assert rendezvous_at(server, fn) == [None, None]


def test_a_job_that_follows_on_the_same_store_finds_no_key_of_the_one_before() -> None:
    def fn(group: ProcessGroup) -> bool:
        before = group.store.check(["key"])
        group.barrier().wait()
        group.store.set("key", b"value")
        return before

    with server_of_two() as server:
        for _ in range(3):
            assert rendezvous_at(server, fn) == [False, False]


def test_nothing_listens_beyond_loopback_unasked_nor_at_all_once_all_are_connected() -> None:
    def listening() -> set[Any]:
        return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    before = listening()

    def fn(group: ProcessGroup) -> set[Any]:
        group.barrier().wait()
        return listening() - before

    with pytest.raises(UsageError, match="secret"):
        TCPStoreServer("0.0.0.0")
    with server_of_two() as server:
        for new in rendezvous_at(server, fn):
            assert {address.ip for address in new} == {"127.0.0.1"}
            assert {address.port for address in new} == {server.port}


def test_a_flood_of_connections_keeps_nobody_from_meeting() -> None:
    with server_of_two() as server:
        flood = [socket.create_connection((server.host, server.port)) for _ in range(300)]
        try:
            assert rendezvous_at(server, lambda group: group.all_reduce(torch.ones(1)).wait().item()) == [
                2.0,
                2.0,
            ]
        finally:
            for stranger in flood:
                stranger.close()


def test_a_stranger_without_the_secret_is_refused_and_the_job_goes_on() -> None:
    with server_of_two() as server:
        with pytest.raises(AuthenticationError):
            TCPStore(server.host, server.port, b"a guess", timeout=PATIENCE)
        assert rendezvous_at(server, lambda group: group.all_reduce(torch.ones(1)).wait().item()) == [
            2.0,
            2.0,
        ]


# -- groups ----------------------------------------------------------------------------------------


def test_making_a_group_asks_neither_the_store_nor_the_ranks_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # who waits for long writes there
    monkeypatch.setattr("shoal.group.diagnostics.member_lists.CHECK_DELAY_S", 2 * PATIENCE)
    done = threading.Event()

    def fn(group: ProcessGroup) -> int:
        if group.rank == 2:
            assert done.wait(PATIENCE)  # it does nothing at all meanwhile
            return 0
        keys = group.store.num_keys()
        for _ in range(30):
            with group.subgroup([0, 1]) as part:
                assert part.all_reduce(torch.ones(1)).wait().item() == 2.0
        assert group.store.num_keys() == keys
        if group.rank == 0:
            group.recv(None, 1).wait()
            done.set()
        else:
            group.send(torch.ones(1), 0).wait()
        return 30

    assert run_threads(fn, 3, timeout=PATIENCE) == [30, 30, 0]


def test_closing_a_group_does_not_wait_for_a_peer_that_hangs(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    left = threading.Barrier(3)

    def fn(group: ProcessGroup) -> None:
        part = group.subgroup([0, 1, 2])
        group.barrier().wait()
        if group.rank != 2:
            future = part.all_reduce(torch.ones(100_000))
            part.close(timeout=0.1)
            assert part.state == "closed"
            with pytest.raises(GroupError, match="all_reduce"):
                future.wait()
        left.wait(PATIENCE)
        assert group.all_reduce(torch.ones(1)).wait().item() == 3.0
        part.close()

    on_three_ranks(fn)


def test_what_was_sent_arrives_though_the_sender_left_at_once(
    on_three_ranks: Callable[..., list[Any]],
) -> None:
    closing = threading.Event()

    def fn(group: ProcessGroup) -> None:
        if group.rank == 0:
            for to in (1, 2):
                group.send(torch.full((300_000,), 5.0), to)
                group.send(torch.full((3,), 6.0), to, tag=1)
            closing.set()
            return
        assert closing.wait(PATIENCE)
        assert group.recv(None, 0, tag=1).wait().tolist() == [6.0] * 3
        assert group.recv(torch.empty(300_000), 0).wait().eq(5.0).all()

    on_three_ranks(fn)
