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

from .agents import Agents, run_agents
from .leaks import no_leaks
from .network import Network
from .outcome import Outcome
from .pool import RankPool
from .processes import Ranks, processes, run_processes
from .threads import run_threads

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
