"""Run a function on several ranks in tests, as threads or processes, with deadlines and injected faults.

    from shoal.testing import run_threads

    def sums(group):
        return group.all_reduce(torch.ones(3)).wait().sum().item()

    assert run_threads(sums, 4) == [12.0] * 4

``run_threads`` takes milliseconds and is enough for most tests. ``run_processes`` and ``processes`` also
cover the death of processes, signals and forks. A ``RankPool`` runs one function after another on the same
processes, also under ``mpiexec``. ``run_agents`` and ``Agents`` do the same for workers of ``shoal.rpc``,
``conformance`` tests backends, and ``linearize`` checks the linearizability of a store. See
``docs/testing.md``.
"""

from typing import TYPE_CHECKING

from .agents import Agents, run_agents
from .leaks import no_leaks
from .network import Network
from .outcome import Outcome
from .processes import Ranks, processes, run_processes
from .threads import run_threads

if TYPE_CHECKING:
    from .pool import RankPool as RankPool

__all__ = [
    "Agents",
    "Network",
    "Outcome",
    "RankPool",
    "Ranks",
    "no_leaks",
    "processes",
    "run_agents",
    "run_processes",
    "run_threads",
]


def __getattr__(name: str) -> object:
    # Not imported with the package, because ranks run the module: python -m shoal.testing.pool.
    if name == "RankPool":
        from .pool import RankPool

        return RankPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
