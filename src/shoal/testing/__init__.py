"""Running a function on several ranks, in tests: as threads or as processes, with deadlines and faults.

    from shoal.testing import run_threads

    def sums(group):
        return group.all_reduce(torch.ones(3)).wait().sum().item()

    assert run_threads(sums, 4) == [12.0] * 4

``run_threads`` takes milliseconds and shows almost everything; ``run_processes`` and ``processes`` are for
what only processes show: their death, signals, forks.  ``run_agents`` and ``Agents`` are the same for workers
of ``shoal.rpc``. ``linearize`` checks what several clients see of
a store.  ``docs/testing.md`` has more.
"""

from .agents import Agents, run_agents
from .leaks import no_leaks
from .network import Network
from .outcome import Outcome
from .processes import Ranks, processes, run_processes
from .threads import run_threads

__all__ = [
    "Agents",
    "Network",
    "Outcome",
    "Ranks",
    "no_leaks",
    "processes",
    "run_agents",
    "run_processes",
    "run_threads",
]
