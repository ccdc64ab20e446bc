"""The machine of the model: the cost of a message.

The model is LogGP (Alexandrov, Ionescu, Schauser and Scheiman, 1995) with ``overhead`` instead of the gap
between short messages; with one message in flight it is Hockney's (1994) with alpha = latency + overhead and
beta = gap. A reduction costs gamma per byte, as in Thakur, Rabenseifner and Gropp (2005). A port can send one
message and receive one message at the same time. ``overhead`` and the bytes occupy it one after another,
because over TCP both are CPU work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parameters:
    """Times in seconds, per message and per byte.

    Attributes:
        latency: from the start of sending to the start of receiving.
        overhead: time for which a message of any size occupies either port.
        gap: time for which a byte occupies either port.
        gamma: time to reduce a byte of one input.
    """

    latency: float
    overhead: float
    gap: float
    gamma: float

    def message(self, nbytes: float) -> float:
        """Return how long a message of ``nbytes`` occupies a port."""
        return self.overhead + nbytes * self.gap

    def shared_by(self, ranks: int) -> Parameters:
        """Return the parameters for one of several ranks that share the port."""
        return replace(self, gap=self.gap * ranks)


#: examples, not measurements: round figures for TCP, and for a fabric that bypasses the kernel
EXAMPLES = {
    "25 GbE, TCP": Parameters(latency=20e-6, overhead=5e-6, gap=1 / 3.1e9, gamma=1 / 20e9),
    "100 Gb fabric": Parameters(latency=2e-6, overhead=0.5e-6, gap=1 / 12e9, gamma=1 / 20e9),
}
