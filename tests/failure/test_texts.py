"""Texts reach the other ranks whatever is in them: long ones are cut, what is no Unicode is spelled out."""

from __future__ import annotations

import pytest

from shoal import GroupAborted, ProcessGroup
from shoal.testing import run_threads

PATIENCE = 40.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("reason", "heard"),
    [
        ("é" * 50_000, "é" * 30_000),
        ("x" + "é" * 50_000, "x" + "é" * 30_000),
        ("\U0001f41f" * 30_000, "\U0001f41f" * 15_000),
        ("a file named \udcff", "a file named \\udcff"),
        ("\ud83d alone", "\\ud83d alone"),
        ("a\0b", "a\0b"),
    ],
    ids=["two bytes", "two bytes, shifted", "four bytes", "undecodable", "half a pair", "nul"],
)
def test_every_rank_hears_the_reason_of_an_abort(reason: str, heard: str, transport: str) -> None:
    def abort(group: ProcessGroup) -> None:
        inner = group.subgroup([0, 1], name="na\udce9me")
        assert "na\\udce9me" in inner.name
        if inner.rank == 0:
            inner.recv(None, 1)
            group.barrier().wait()
            inner.abort(reason)
        else:
            future = inner.recv(None, 0)
            group.barrier().wait()
            with pytest.raises(GroupAborted) as caught:
                future.wait(PATIENCE)
            text = str(caught.value)
            assert f"aborted the group: {heard}" in text
            text.encode()
            with pytest.raises(GroupAborted):
                inner.barrier()
        assert inner.state == "aborted"
        inner.close(PATIENCE)

    run_threads(abort, 2, transport=transport, timeout=PATIENCE)
