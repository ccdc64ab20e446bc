"""The words that the mode's first proposal had, beside the devices of torch: ``shoal.distributed`` has them.

This module begins the mode, :mod:`.typed` has the constructors and :mod:`.within` has ``node``.

    shoal.distributed.init_master_worker(backend="tcp", workers=2)
    x = shoal.distributed.FloatTensor(20, 20).fill_(4)
    y = torch.randn(20, 20).dist_send()
    with shoal.distributed.node(1):
        a = shoal.distributed.FloatTensor(10)

``dist_send`` is a method of all tensors while a master is open.
"""

from __future__ import annotations

from typing import Any

from ..distributed.backend import parse_backend
from . import master


def init_master_worker(backend: str | None = None, **how: Any) -> master.Master:
    """:func:`shoal.init_master_worker`, with the names that ``init_process_group`` has for backends.

    Raises:
        UnsupportedOperation: a backend that shoal has nothing for.
    """
    parse_backend(backend)
    return master.init_master_worker(**how)
