"""Where ``init_process_group`` meets: torch's init methods and environments as URLs of ``shoal.init``."""

from __future__ import annotations

import pytest

import shoal
from shoal.distributed.lifecycle import rendezvous_address

MASTER = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("init_method", "rank", "size", "environ", "expected"),
    [
        (None, -1, -1, {}, ("env://", None, None)),
        ("env://", 1, 2, {}, ("env://", 1, 2)),
        ("tcp://host:1", 0, 2, {}, ("tcp://host:1", 0, 2)),
        ("tcp://host:1?rank=1&world_size=2&use_libuv=0", -1, -1, {}, ("tcp://host:1", 1, 2)),
        ("file:///a/b?world_size=2", 1, -1, {}, ("file:///a/b", 1, 2)),
        ("mine://x?rank=1&other=2", -1, -1, {}, ("mine://x?other=2", 1, None)),
        # a script's own variables
        (None, 1, 2, MASTER, ("tcp://host:29500", 1, 2)),
        ("env://?rank=1&world_size=2", -1, -1, MASTER, ("tcp://host:29500", 1, 2)),
        (None, 1, -1, {**MASTER, "WORLD_SIZE": "2"}, ("tcp://host:29500", 1, 2)),
        (None, -1, 2, {**MASTER, "RANK": "1"}, ("tcp://host:29500", 1, 2)),
        (None, -1, 2, MASTER, ("env://", None, 2)),
        ("tcp://other:1", 1, 2, MASTER, ("tcp://other:1", 1, 2)),
        # a launcher knows more
        (None, -1, -1, {**MASTER, "RANK": "1", "WORLD_SIZE": "2"}, ("env://", None, None)),
        (None, 1, 2, {**MASTER, "SHOAL_STORE": "tcp://h:1"}, ("env://", 1, 2)),
        (None, 1, 2, {**MASTER, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("env://", 1, 2)),
    ],
)
def test_torchs_ways_lead_to_a_place(
    init_method: str | None, rank: int, size: int, environ: dict[str, str], expected: tuple[str, int, int]
) -> None:
    assert rendezvous_address(init_method, rank, size, environ) == expected


@pytest.mark.parametrize(
    ("init_method", "rank", "environ", "words"),
    [
        ("tcp://host:1?rank=0", 1, {}, "rank is given twice: 1 as an argument and 0 in the URL"),
        ("tcp://host:1?rank=x", -1, {}, "rank='x' in the URL: expected a non-negative integer"),
        (None, 1, {**MASTER, "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        (None, -1, {**MASTER, "RANK": "x"}, "RANK='x'"),
        (3, -1, {}, "init_method=3: expected a str"),
        (None, "1", {}, "rank='1': expected an integer"),
    ],
)
def test_what_cannot_be_a_place_is_refused(
    init_method: str | None, rank: int, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(shoal.UsageError, match=words):
        rendezvous_address(init_method, rank, 2, environ)
