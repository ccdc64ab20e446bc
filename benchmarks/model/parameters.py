"""The machine of the model: what a message costs.

It is LogGP (Alexandrov, Ionescu, Schauser and Scheiman, 1995) without the gap between short messages,
which ``overhead`` stands for; with one message in flight it is Hockney's alpha and beta (1994),
alpha = latency + overhead, beta = gap.  A reduction costs gamma a byte, as in Thakur, Rabenseifner and
Gropp (2005).  A port sends one message at a time and receives one at a time, both at once.  ``overhead`` and
the bytes occupy it one after another: over TCP both are work of the processor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parameters:
    """Times in seconds, of one message and of one byte.

    Attributes:
        latency: from the start of sending to the start of receiving.
        overhead: for which a message of any size occupies either port.
        gap: for which a byte occupies either port.
        gamma: to reduce a byte of one input.
    """

    latency: float
    overhead: float
    gap: float
    gamma: float

    def message(self, nbytes: float) -> float:
        """For how long a message of ``nbytes`` occupies a port."""
        return self.overhead + nbytes * self.gap

    def shared_by(self, ranks: int) -> Parameters:
        """As one of several ranks sees it that use the same port at once."""
        return replace(self, gap=self.gap * ranks)


#: examples, not measurements: round figures for TCP, and for a fabric that is used without the kernel
EXAMPLES = {
    "25 GbE, TCP": Parameters(latency=20e-6, overhead=5e-6, gap=1 / 3.1e9, gamma=1 / 20e9),
    "100 Gb fabric": Parameters(latency=2e-6, overhead=0.5e-6, gap=1 / 12e9, gamma=1 / 20e9),
}
