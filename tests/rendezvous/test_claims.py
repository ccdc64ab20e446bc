"""Claims of ranks in stores that make calls one by one, and fail in their middle."""

from __future__ import annotations

from typing import ClassVar

import pytest

from shoal import Store, StoreTimeout
from tests.support.dictionary_store import Dictionary

from .together import meet_in


class _OneByOne(Dictionary):
    """A store that makes calls one by one, and fails once where a key ends so."""

    fails_at: ClassVar[list[str]] = []

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        if self.fails_at and key.endswith(self.fails_at[0]):
            self.fails_at.clear()
            raise StoreTimeout("no answer")
        return super().swap(key, held, value)

    def clone(self, timeout: float) -> _OneByOne:
        return _OneByOne(self.name)


@pytest.mark.parametrize(
    ("rank", "key"), [(0, "/room"), (0, "/rank/0"), (0, "/came"), (None, "/arrivals"), (None, "/came")]
)
def test_a_rank_whose_claim_fails_halfway_can_try_again(
    rank: int | None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dictionary, "tables", {})
    monkeypatch.setattr(_OneByOne, "fails_at", [key])
    with Store(_OneByOne("name"), 10.0) as store:
        with pytest.raises(StoreTimeout):
            meet_in(store, rank, 1)
        assert not store.list_keys("job/0/0/rank/")
        assert meet_in(store, rank, 1).rank == 0
