"""The algorithms between hosts: equal results for all numbers of members, and the choice of a group."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

import shoal
from shoal import ProcessGroup, _core
from shoal.backend.identity import Tuning
from shoal.spec import OpKind
from shoal.testing import run_threads

HOSTS = ["ab", "abc", "abcde", "abcdefgh", "aabb", "aabbcc", "aabbccd"]
#: numbers of elements: fewer than a cache line, than members have lines, and more than a message has at once
COUNTS = (0, 1, 3, 17, 1000, 70_001)


def _sums(group: ProcessGroup, count: int, dtype: torch.dtype) -> None:
    """All operations that depend on the algorithm, on small whole numbers, whose sums are exact."""
    size, rank = group.size, group.rank
    base = torch.arange(count) % 7
    mine, total = (base * (rank + 1)).to(dtype), (base * (size * (size + 1) // 2)).to(dtype)
    x = mine.clone()
    group.all_reduce(x).wait()
    assert torch.equal(x, total)
    for root in (0, size - 1):
        x = mine.clone()
        group.reduce(x, root).wait()
        assert torch.equal(x, total if rank == root else mine)
    expected = torch.stack([(base * (r + 1)).to(dtype) for r in range(size)])
    separate = [torch.empty(count, dtype=dtype) for _ in range(size)]
    group.all_gather(separate, mine).wait()
    assert torch.equal(torch.stack(separate), expected)
    together = torch.empty(size, count, dtype=dtype)
    group.all_gather(list(together), mine).wait()
    assert torch.equal(together, expected)
    part = torch.empty(count, dtype=dtype)
    group.reduce_scatter(part, [(base + rank + r).to(dtype) for r in range(size)]).wait()
    assert torch.equal(part, (base * size + rank * size + size * (size - 1) // 2).to(dtype))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("algorithm", ["direct", "doubling", "halving", "ring"])
def test_every_algorithm_has_the_right_result(algorithm: str, hosts: str) -> None:
    def rank(group: ProcessGroup) -> None:
        for count in COUNTS:
            for dtype in (torch.float32, torch.float16, torch.int64):
                _sums(group, count, dtype)
        group.barrier().wait()
        for root in (0, group.size - 1):
            x = torch.full((5000,), float(group.rank))
            group.broadcast(x, root).wait()
            assert (x == root).all()

    run_threads(rank, len(hosts), hosts=list(hosts), algorithm=algorithm)


@pytest.mark.parametrize("hosts", ["abcdefg", "aabbc", "aabbcc"])
@pytest.mark.parametrize("algorithm", ["direct", "doubling", "halving", "ring"])
@pytest.mark.parametrize("op", ["avg", "product", "min"])
def test_all_ranks_have_the_same_bits_in_every_run(op: str, algorithm: str, hosts: str) -> None:
    size = len(hosts)

    def rank(group: ProcessGroup) -> list[bytes]:
        found = []
        for count in (5, 4000):
            x = torch.randn(count, generator=torch.Generator().manual_seed(group.rank)).bfloat16()
            x[0] = float("nan") if group.rank == 1 else -0.0
            group.all_reduce(x, op).wait()
            y = x.clone()
            group.broadcast(y, 0).wait()
            assert torch.equal(x.view(torch.int16), y.view(torch.int16))
            assert x[0].isnan()
            # Rounded once, at the end.
            inputs = [
                torch.randn(count, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(size)
            ]
            wide = torch.stack([each.float() for each in inputs])
            exact = {"avg": wide.mean(0), "product": wide.prod(0), "min": wide.amin(0)}[op].bfloat16()
            assert torch.allclose(x[1:].float(), exact[1:].float(), rtol=2**-7, atol=0)
            found.append(x.view(torch.int16).numpy().tobytes())
        return found

    first, second = (run_threads(rank, size, hosts=list(hosts), algorithm=algorithm) for _ in range(2))
    assert first == second
    assert all(each == first[0] for each in first)


@pytest.mark.parametrize("algorithm", ["doubling", "halving", "ring"])
def test_the_late_rank_is_named_also_by_ranks_that_wait_for_others(algorithm: str) -> None:
    """Rank 5 is late; most ranks wait for ranks that wait for it."""

    def rank(group: ProcessGroup) -> Sequence[int]:
        group.barrier().wait()
        if group.rank == 5:
            time.sleep(0.3)
        group.all_reduce(torch.ones(100)).wait()
        late = group.stats().late
        group.barrier().wait()
        return [each.rank for each in late if each.seconds > 0.1]

    named = run_threads(rank, 8, hosts=list("abcdefgh"), algorithm=algorithm)
    assert [each for r, each in enumerate(named) if r != 5] == [[5]] * 7


def test_groups_have_the_algorithm_of_their_parent_or_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: ProcessGroup) -> tuple[str, str]:
        with group.split(0) as same, group.split(0, algorithm="direct") as other:  # type: ignore[union-attr]
            return same._spec.tuning.algorithm, other._spec.tuning.algorithm  # type: ignore[union-attr]

    assert run_threads(rank, 2, algorithm="halving") == [("halving", "direct")] * 2
    monkeypatch.setenv("SHOAL_ALGORITHM", "doubling")
    assert run_threads(rank, 2) == [("doubling", "direct")] * 2
    monkeypatch.setenv("SHOAL_ALGORITHM", "star")
    with pytest.raises(shoal.ConfigurationError, match="expected auto, direct, doubling, halving or ring"):
        Tuning.chosen()
    with pytest.raises(
        shoal.UsageError, match="algorithm='star': expected one of auto, direct, doubling, halving, ring"
    ):
        Tuning().changed(None, "star")


def test_ranks_that_choose_differently_hear_of_just_that() -> None:
    def rank(group: ProcessGroup) -> str:
        with pytest.raises(shoal.UsageError) as refused:
            group.split(0, algorithm=("halving", "doubling")[group.rank])
        return str(refused.value)

    for text in run_threads(rank, 2):
        assert "algorithm='" in text


def test_the_choice_depends_on_size_and_number_of_members() -> None:
    def chosen(kind: OpKind, members: int, size: int) -> str:
        return _core.algorithm_for(kind, members, size, size, True)

    all_reduce = OpKind.ALL_REDUCE
    assert [chosen(all_reduce, members, 8) for members in (1, 2, 8, 16)] == ["direct"] * 4
    assert [chosen(all_reduce, members, 8) for members in (32, 1024)] == ["doubling"] * 2
    assert [chosen(all_reduce, 1024, size) for size in (4 << 10, 1 << 20)] == ["doubling", "halving"]
    assert chosen(all_reduce, 16, 25 << 20) == "direct"
    assert chosen(OpKind.ALL_GATHER, 1024, 1024 * 8) == "halving"
    assert chosen(OpKind.BROADCAST, 1024, 8) == "direct"


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_large_broadcast_sends_parts_that_others_send_on(hosts: str) -> None:
    def rank(group: ProcessGroup) -> None:
        for nbytes in (262_144, 1_000_003, 9 << 20):
            for root in (0, group.size - 1):
                expected = torch.arange(nbytes) % (250 - root)
                x = expected.byte() if group.rank == root else torch.zeros(nbytes, dtype=torch.uint8)
                group.broadcast(x, root).wait()
                assert torch.equal(x, expected.byte())
        pending = []
        for value in range(4):
            x = torch.full((400_000,), float(value)) if group.rank == 1 else torch.empty(400_000)
            pending.append((group.broadcast(x, 1), x, value))
        for future, x, value in pending:
            future.wait()
            assert (x == value).all()

    run_threads(rank, len(hosts), hosts=list(hosts))


def test_a_large_broadcast_names_the_late_member_whose_part_is_missing() -> None:
    def rank(group: ProcessGroup) -> Sequence[int]:
        group.barrier().wait()
        if group.rank == 2:
            time.sleep(0.3)
        group.broadcast(torch.zeros(1 << 20), 0).wait()
        late = group.stats().late
        group.barrier().wait()
        return [each.rank for each in late if each.seconds > 0.1]

    named = run_threads(rank, 4, hosts=list("abcd"))
    assert named == [[], [2], [], [2]]
