"""Ports for servers that tests start later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago, and that the kernel gives to no connection since."""
    first = int(_EPHEMERAL.read_text().split()[0])
    low, high = (10_000, first) if first > 11_000 else (1024, 65_536)
    while True:
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(low, high)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
