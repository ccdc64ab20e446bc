"""What makes one machine look like shared memory, a network, or several hosts of several ranks."""

from __future__ import annotations

from typing import Any

TOPOLOGIES = ("shm", "tcp", "hierarchical")


def topology_options(topology: str, size: int) -> dict[str, Any]:
    """Options of ``run_threads`` and ``processes`` for one of :data:`TOPOLOGIES` on the native backend."""
    if topology == "hierarchical":
        # Three ranks interleaved, the others in halves of neighbours.
        return {"hosts": list("aba") if size == 3 else ["ab"[2 * rank >= size] for rank in range(size)]}
    return {"transport": "tcp"} if topology == "tcp" else {}
