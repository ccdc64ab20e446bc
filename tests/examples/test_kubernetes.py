"""The manifests of examples/kubernetes: their pods are processes on hosts of one network."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from shoal.testing import Network
from tests.support.machines import LONG, Machines, Program, why_none
from tests.support.programs import run_program
from tests.support.waiting import until

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
SOURCE = Path(shoal.__file__).parent.parent
#: a pod that fails so often will never do better
_MOST = 10
#: a pod sees no process of another one
_POD = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """What a file has, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


def template(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


class Pods:
    """The pods of a Job or Deployment, each of which starts again when it has failed.

    Args:
        machines: a host for each pod.
        manifest: of the Job or Deployment.
        folder: for the volumes, and for what pods say.
        arguments: behind those of the manifest.
    """

    def __init__(self, machines: Machines, manifest: dict[str, Any], folder: Path, *arguments: str) -> None:
        (container,) = template(manifest)["containers"]
        self._machines, self._folder, self._container = machines, folder, container
        self._indexed = manifest["spec"].get("completionMode") == "Indexed"
        self._arguments = arguments
        self._failures: dict[str, int] = {}
        self._running: dict[str, tuple[Program, contextlib.ExitStack]] = {}
        for mount in container["volumeMounts"]:
            (folder / mount["name"]).mkdir(exist_ok=True)
        secret = folder / "secret" / "secret"
        if not secret.exists():
            secret.touch(0o600)
            secret.write_text("of the test")

    def said(self, host: str) -> str:
        path = self._folder / f"{host}.log"
        return path.read_text() if path.exists() else ""

    def start(self, host: str, index: int) -> None:
        """Start the pod on ``host``, or start it again."""
        environment = {each["name"]: self._local(each["value"]) for each in self._container["env"]}
        environment |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONPATH": str(SOURCE)}
        if self._indexed:
            environment["JOB_COMPLETION_INDEX"] = str(index)
        program, *arguments = map(self._local, self._container["command"])
        assert program == "python"
        steps = contextlib.ExitStack()
        command = [*_POD, sys.executable, *arguments, *self._arguments]
        output = self._folder / f"{host}.log"
        started = self._machines.start(host, command, environment=environment, output=output, folder=FOLDER)
        self._running[host] = (steps.enter_context(started), steps)

    def kill(self, host: str) -> None:
        """As when its node fails."""
        self._running[host][0].kill()

    def signal(self, number: signal.Signals) -> None:
        """Send all a signal."""
        for program, _ in self._running.values():
            program.signal(number, deep=True)

    def tend(self, until_true: Callable[[], bool]) -> None:
        """Start again what has failed, until something is so."""

        def look() -> bool:
            for index, (host, (program, steps)) in enumerate(list(self._running.items())):
                if program.ended and program.end()[0] != 0:
                    self._failures[host] = self._failures.get(host, 0) + 1
                    assert self._failures[host] < _MOST, self._all_said()
                    steps.close()
                    self.start(host, index)
            return until_true()

        until(look, self._all_said, patience=2 * LONG)

    def finished(self) -> bool:
        return all(program.ended and program.end()[0] == 0 for program, _ in self._running.values())

    def close(self) -> None:
        for _, steps in self._running.values():
            steps.close()

    def _local(self, text: str) -> str:
        """Paths of volumes are folders here."""
        for mount in self._container["volumeMounts"]:
            text = re.sub(f"^{mount['mountPath']}(?=/)", str(self._folder / mount["name"]), text)
        return text

    def _all_said(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self._folder.glob("*.log"))


@contextlib.contextmanager
def hosts(folder: Path, *names: str) -> Iterator[Machines]:
    if reason := why_none():
        pytest.skip(reason)
    with Network(*names) as network, Machines(network, folder, domain="train") as machines:
        yield machines


def losses(text: str) -> list[tuple[int, float]]:
    found = re.findall(r"^step ([0-9]+): over, loss ([0-9.]+)$", text, re.M)
    return [(int(step), float(loss)) for step, loss in found]


def alone(folder: Path, steps: int) -> float:
    """The loss of one process that trains as long."""
    (said,) = run_program(FOLDER / "train.py", 1, "--steps", str(steps), folder=folder)
    ((_, loss),) = losses(said)
    return loss


def test_the_manifests_say_what_belongs_together() -> None:
    kinds = manifests("job.yaml")
    service, job = kinds["Service"], kinds["Job"]
    spec = job["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert template(job)["subdomain"] == service["metadata"]["name"]
    told = {each["name"]: each["value"] for each in template(job)["containers"][0]["env"]}
    assert int(told["SHOAL_SIZE"]) == spec["completions"] == spec["parallelism"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert told["SHOAL_STORE"].startswith(f"tcp://{host}:")
    deployment = manifests("elastic.yaml")["Deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    etcd = manifests("etcd.yaml")
    (port,) = etcd["Service"]["spec"]["ports"]
    (container,) = deployment["template"]["spec"]["containers"]
    told = {each["name"]: each["value"] for each in container["env"]}
    assert told["SHOAL_STORE"] == f"etcd://{etcd['Service']['metadata']['name']}:{port['port']}"
    for each in (*kinds.values(), *manifests("elastic.yaml").values(), *etcd.values()):
        if "template" in each["spec"]:
            (container,) = template(each)["containers"]
            volumes = {volume["name"] for volume in template(each).get("volumes", [])}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes


def test_pods_of_an_indexed_job_train_and_start_again_when_one_has_died(tmp_path: Path) -> None:
    job = manifests("job.yaml")["Job"]
    names = [f"train-{index}" for index in range(job["spec"]["completions"])]
    with hosts(tmp_path, *names) as machines:
        pods = Pods(machines, job, tmp_path)
        try:
            for index, name in enumerate(names):
                pods.start(name, index)
            pods.tend((tmp_path / "checkpoints" / "last.pt").exists)
            pods.kill("train-1")
            pods.tend(pods.finished)
        finally:
            pods.close()
        texts = [pods.said(name) for name in names]
    assert ["rank 0 of 2" in texts[0], "rank 1 of 2" in texts[1]] == [True, True]
    first = {losses(text)[-1] for text in texts}
    assert len(first) == 1
    ((steps, loss),) = first
    assert any("TooFewRanks" in text for text in texts)
    assert loss == pytest.approx(alone(tmp_path, steps), rel=1e-4)


@pytest.mark.stress
def test_pods_of_a_deployment_join_in_the_place_of_one_that_died_and_go_on_after_all_were_stopped(
    tmp_path: Path,
) -> None:
    if missing := why_none("etcd"):
        pytest.skip(missing)
    deployment = manifests("elastic.yaml")["Deployment"]
    (server,) = template(manifests("etcd.yaml")["Deployment"])["containers"]
    names = ["pod-1", "pod-2", "pod-3"]
    with contextlib.ExitStack() as steps:
        machines = steps.enter_context(hosts(tmp_path, *names, "etcd"))
        command = [*server["command"], f"--data-dir={tmp_path}/data"]
        steps.enter_context(machines.start("etcd", command, output=tmp_path / "etcd.log"))
        lasting = Pods(machines, deployment, tmp_path, "--steps", "100000000", "--every", "20")
        steps.callback(lasting.close)
        for index, name in enumerate(names):
            lasting.start(name, index)
        whole = lambda: all("of 3" in lasting.said(name) for name in names)  # noqa: E731
        lasting.tend(whole)
        (tmp_path / "checkpoints" / "last.pt").unlink(missing_ok=True)
        lasting.tend((tmp_path / "checkpoints" / "last.pt").exists)  # they train
        before = lasting.said("pod-1").count("of 3")
        lasting.kill("pod-1")
        lasting.tend(lambda: lasting.said("pod-1").count("of 3") > before)
        lasting.signal(signal.SIGTERM)  # as `kubectl delete` does
        lasting.tend(lasting.finished)
        # Who hears of it a step earlier leaves alone; the others are too few then, and save.
        at = max(losses(lasting.said(name))[-1] for name in names)[0]
        # Two pods of the next Deployment go on from there.
        further = Pods(machines, deployment, tmp_path, "--steps", str(at + 50))
        steps.callback(further.close)
        for index, name in enumerate(names[:2]):
            further.start(name, index)
        further.tend(further.finished)
        ends = {losses(further.said(name))[-1] for name in names[:2]}
    assert len(ends) == 1
    ((steps_done, loss),) = ends
    assert steps_done == at + 50
    assert loss == pytest.approx(alone(tmp_path, steps_done), rel=1e-4)
