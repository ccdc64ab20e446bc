"""Servers of etcd for tests, on this host alone."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .ports import free_port
from .server_process import ServerProcess

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd (Debian: etcd-server)")


class EtcdServer(ServerProcess):
    """One server; a context, which ends it.

    Args:
        folder: for its data.
        name: of the server in its cluster.
        cluster: the name and the address towards the others of each server; None: there are no others.
        options: further ones of the program.
        durable: what is acknowledged is on disk, and survives a ``kill``.
        scheme: of the clients.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "only",
        cluster: dict[str, str] | None = None,
        *options: str,
        durable: bool = False,
        scheme: str = "http",
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        cluster = cluster or {name: f"127.0.0.1:{free_port()}"}
        self.peers = cluster[name]
        alone = len(cluster) == 1
        self._scheme = scheme
        command = [
            "etcd", "--name", name, "--data-dir", str(folder / name),
            "--listen-client-urls", f"{scheme}://{self.address}",
            "--advertise-client-urls", f"{scheme}://{self.address}",
            "--listen-peer-urls", f"http://{self.peers}",
            "--initial-advertise-peer-urls", f"http://{self.peers}",
            "--initial-cluster", ",".join(f"{each}=http://{peers}" for each, peers in cluster.items()),
            # A lease lives for three halves of the second one at least.
            "--heartbeat-interval", "10" if alone else "50", "--election-timeout", "100" if alone else "500",
            *([] if durable else ["--unsafe-no-fsync"]), *options,
        ]  # fmt: skip
        super().__init__(command, folder / f"{name}.log")

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """What it answers; bytes become base64."""
        url, headers = f"http://{self.address}/v3/{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, msgspec.json.encode(body), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def count(self, prefix: str) -> int:
        """The number of keys under ``prefix``."""
        first = prefix.encode()
        last = first[:-1] + bytes([first[-1] + 1])
        return int(self.ask("kv/range", key=first, range_end=last, count_only=True).get("count", 0))

    def _answers(self) -> bool:
        if self._scheme != "http":
            return "serving client requests" in self._log.read_text()
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return self.ask("maintenance/status").get("leader", "0") != "0"
        return False


@contextlib.contextmanager
def etcd_cluster(folder: Path, size: int) -> Iterator[list[EtcdServer]]:
    """Servers of one etcd, whose data survive kills."""
    peers = {f"server-{number}": f"127.0.0.1:{free_port()}" for number in range(size)}
    servers = [EtcdServer(folder, name, peers, durable=True) for name in peers]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.await_answer()
        yield servers
    finally:
        for server in servers:
            server.kill()


def leader_of(servers: list[EtcdServer]) -> EtcdServer | None:
    """The one that leads, of those that run; None while none does."""
    for server in servers:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            status = server.ask("maintenance/status")
            if status.get("leader", "0") == status["header"]["member_id"]:
                return server
    return None
