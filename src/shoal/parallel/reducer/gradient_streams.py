"""The streams on which gradients are written, and the order of the reduction behind them.

Autograd runs each part of backward on the stream that was current in its part of forward, and each device in
a thread of its own.  The hook that completes a bucket may run on another stream than the hooks of the other
gradients in it.  At the end of backward autograd makes the caller's streams wait for all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from ...streams import runtime_of


class GradientStreams:
    """The streams on which gradients were written since the last :meth:`clear`."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[Any]] = {}

    def note(self, device: torch.device) -> None:
        """Note the current stream of ``device``.  Called by hooks of gradients, one at a time."""
        stream = runtime_of(device).current_stream(device)
        noted = self._streams.setdefault(device, [])
        if stream not in noted:
            noted.append(stream)

    def order(self) -> None:
        """Make the current streams wait for the gradients written so far; does not block the host."""
        for device, streams in self._streams.items():
            runtime = runtime_of(device)
            current = runtime.current_stream(device)
            for stream in streams:
                if stream != current:
                    runtime.wait_event(current, runtime.record(stream))

    def clear(self) -> None:
        """Forget all streams."""
        self._streams.clear()
