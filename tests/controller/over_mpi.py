"""Collectives of a place, for a comparison of data channels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from shoal.controller import Place
from shoal.controller.node import peers


def results(place: Place) -> Iterator[torch.Tensor]:
    """Yield the results of all kinds of collectives, of small and of large tensors."""
    size = len(place)
    for count in (5, 300_001):
        for dtype, op in ((torch.float32, "sum"), (torch.float32, "avg"), (torch.bfloat16, "sum")):
            x = [(torch.arange(count) % 97 / 7 + node).to(dtype) for node in range(size)]
            yield from place.gather(place.all_reduce_(place.scatter(x), op))
        yield from place.gather(place.broadcast_(place.scatter(x), place[1]))
        yield from place.gather(place.all_gather(place.scatter(x)))
        yield from place.gather(place.reduce_scatter(place.scatter([torch.cat([each] * size) for each in x])))
    y = place.scatter([torch.full((3,), node / 3) for node in range(size)])
    place.average_([y])
    yield place.mean(y).cpu()


def digests(place: Place) -> list[str]:
    """Return a digest of the bytes of each result."""
    return [
        hashlib.sha256(each.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
        for each in results(place)
    ]


def backends() -> list[str]:
    """On a node: the names of the backends of its places."""
    return [
        place.group._backend.name
        for each in peers._sessions.values()
        for place in each.groups._groups.values()
        if place.group is not None
    ]
