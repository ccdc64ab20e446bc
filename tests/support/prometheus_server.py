"""A Prometheus for tests, on this host alone."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .ports import free_port
from .server_process import ServerProcess

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="there is no prometheus (Debian: prometheus)"
)


class PrometheusServer(ServerProcess):
    """One server with this configuration; a context, which ends it."""

    def __init__(self, folder: Path, configuration: Path) -> None:
        self._url = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._url}",
        ]  # fmt: skip
        super().__init__(command, folder / "prometheus.log")

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """The values of an expression now, by the values of its labels, sorted by their names."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://{self._url}/api/v1/query?{query}", timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{expression}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        return {
            tuple(text for _, text in sorted(each["metric"].items())): float(each["value"][1])
            for each in found["data"]["result"]
        }

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._url}/-/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False
