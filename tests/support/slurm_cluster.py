"""A real Slurm: one controller, and a daemon on each host of a network.

    with Network("a", "b") as network, SlurmCluster(network, folder) as slurm:
        code, said = slurm.run(["srun", "-N", "2", "hostname"])

All of it lies in one folder, talks within the network alone, and ends with the tests.  Who a client is it
says itself (``auth/none``), so nothing but a key is missing of what a cluster does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from shoal.testing import Network
from shoal.testing.network import STORE

from .machines import LONG, Machines, Program, why_none
from .waiting import until

#: where the controller runs, and commands by default
LOGIN = STORE
#: as many as a test likes, whatever the machine has
_CPUS = 16
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PlugStackConfig=/dev/null
ReturnToService=2
KillWait=10
JobRequeue=1
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str:
    """Why there can be no Slurm here, in words; empty if there can."""
    if missing := why_none("slurmctld", "slurmd", "srun"):
        return f"no cluster of Slurm: {missing} (Debian: apt install slurm-wlm)"
    return ""


class SlurmCluster:
    """The hosts of ``network`` as nodes, and one more, ``LOGIN``, that controls them.

    Args:
        network: lives at least as long.
        folder: for all files.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.machines = Machines(network, folder)
        self._folder, self._nodes = folder, network.hosts
        self._daemons = contextlib.ExitStack()
        self._configuration = folder / "slurm.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(login=LOGIN, folder=folder, nodes=",".join(network.hosts), cpus=_CPUS)
        )
        try:
            self._daemon(LOGIN, "slurmctld", "-D", "-i")
            for node in network.hosts:
                self._daemon(node, "slurmd", "-D", "-N", node)
            until(lambda: self.states() == ["idle"] * len(network.hosts), self._logs, patience=LONG)
        except BaseException:
            self.close()
            raise

    def start_now(self, job: str) -> None:
        """Have a job start that was queued again; to be called until it does.

        Slurm lets two minutes pass by itself, and may say so after it was told otherwise.
        """
        self.run(["scontrol", "update", f"jobid={job}", "starttime=now"])
        time.sleep(0.5)

    def states(self) -> list[str]:
        """Of the nodes, in their order."""
        _, said = self.run(["sinfo", "--noheader", "--Node", "-o", "%T"])
        return said.split()

    @contextlib.contextmanager
    def start(
        self, command: Sequence[str | os.PathLike[str]], environment: Mapping[str, str] | None = None
    ) -> Iterator[Program]:
        """Run a command, such as srun, where the controller runs; killed at the end of the block."""
        with self.machines.start(LOGIN, command, environment=self._told(environment)) as program:
            yield program

    def run(
        self, command: Sequence[str | os.PathLike[str]], environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command there to its end: its exit code, and what it said."""
        return self.machines.run(LOGIN, command, environment=self._told(environment))

    def close(self) -> None:
        """End all daemons and what they have started."""
        self.machines.close()
        self._daemons.close()

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _daemon(self, host: str, *command: str) -> None:
        log = self._folder / f"{command[0]}-{host}.log"
        environment = self._told(None)
        self._daemons.enter_context(self.machines.start(host, command, environment=environment, output=log))

    def _told(self, environment: Mapping[str, str] | None) -> dict[str, str]:
        return {**(environment or {}), "SLURM_CONF": str(self._configuration)}

    def _logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self._folder.glob("slurm*.log")))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Nodes a and b; the test is skipped where there can be none."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    with Network("a", "b") as network, SlurmCluster(network, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
