"""Samples: each one once a pass, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import UsageError
from shoal.elastic import Samples

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=40)


@given(st.integers(6, 40), st.integers(6, 40), sizes, st.integers(0, 3))
def test_each_sample_comes_once_a_pass_whatever_the_number_of_ranks(
    length: int, batch: int, sizes: list[int], seed: int
) -> None:
    length, batch = max(length, batch), min(length, batch)
    samples = Samples(length, batch=batch, seed=seed)
    dealt = []
    for size in sizes:
        shares = [samples.share(rank, size) for rank in range(size)]
        assert [share.indices.tolist() for share in shares] == [
            samples.share(rank, size).indices.tolist() for rank in range(size)
        ]  # a step that comes again takes the same
        assert sum(len(share.indices) for share in shares) == shares[0].batch == batch
        assert max(map(len, (s.indices for s in shares))) - min(map(len, (s.indices for s in shares))) <= 1
        # The mean over ranks of weighted means is the mean over the batch.
        values = torch.arange(length, dtype=torch.double) ** 2
        mean = sum(values[share.indices].mean() * share.weight for share in shares) / size
        together = torch.cat([share.indices for share in shares])
        torch.testing.assert_close(mean, values[together].mean())
        dealt.append(together)
        samples.advance(batch)
    everything = torch.cat(dealt)
    whole = len(everything) // length * length
    assert bool((everything[:whole].view(-1, length).sort(1).values == torch.arange(length)).all())
    rest = everything[whole:]
    assert len(rest.unique()) == len(rest) == samples.offset
    assert samples.passes == whole // length


def test_the_order_follows_from_the_seed_and_differs_from_pass_to_pass() -> None:
    one, other, same = (Samples(30, batch=30, seed=seed) for seed in (1, 2, 1))
    first = one.share(0, 1).indices
    assert torch.equal(first, same.share(0, 1).indices)
    assert not torch.equal(first, other.share(0, 1).indices)
    one.advance(30)
    assert not torch.equal(first, one.share(0, 1).indices)


def test_a_batch_of_so_many_a_rank_shrinks_with_the_group() -> None:
    samples = Samples(20, per_rank=3)
    assert [samples.share(1, size).batch for size in (3, 2)] == [9, 6]
    assert samples.share(1, 3).weight == 1.0


def test_training_goes_on_at_a_saved_position() -> None:
    samples = Samples(20, batch=8, seed=5)
    samples.advance(8)
    samples.advance(8)
    again = Samples(20, batch=8, seed=5)
    again.load_state_dict(samples.state_dict())
    assert torch.equal(samples.share(1, 2).indices, again.share(1, 2).indices)
    with pytest.raises(UsageError, match="seed=5, here it is 6"):
        Samples(20, batch=8, seed=6).load_state_dict(samples.state_dict())
    with pytest.raises(UsageError, match="length=20, here it is 21"):
        Samples(21, batch=8, seed=5).load_state_dict(samples.state_dict())


def test_what_cannot_be_shared_out_is_refused() -> None:
    for given_, said in (
        ({}, "either batch= .* or per_rank="),
        ({"batch": 3, "per_rank": 3}, "either batch= .* or per_rank="),
        ({"batch": 0}, "batch=0: expected a positive integer"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"batch": 11}, "a batch of 11 of 10 samples"),
        ({"batch": 2, "seed": "x"}, "seed='x': expected an integer"),
    ):
        with pytest.raises(UsageError, match=said):
            Samples(10, **given_)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be shared out over 4 ranks"):
        Samples(10, batch=3).share(0, 4)
    with pytest.raises(UsageError, match="a batch of 12 of 10 samples"):
        Samples(10, per_rank=3).share(0, 4)
