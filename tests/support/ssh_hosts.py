"""Hosts that ssh reaches: network namespaces of this machine, each with an sshd of its own.

Keys, known hosts and configuration lie in a folder of the test; nothing of the machine's own ssh is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from shoal.testing import Network
from shoal.testing.network import STORE, why_unavailable

from .machines import LONG
from .waiting import until

_PORT = 22
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
#: where the launcher runs
HEAD = STORE
#: a command of shoal takes a second; a busy machine may make it many
DEADLINE = 120.0

_SSHD = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
AllowUsers root
MaxStartups 100
SetEnv {environment}
"""
_SSH = """
Host {name}
  HostName {address}
  Port {port}
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
"""


@cache
def why_no_ssh_hosts() -> str:
    """Why this process cannot have such hosts, in words; empty if it can."""
    for program, package in (("sshd", "openssh-server"), ("ssh", "openssh-client")):
        if shutil.which(program, path=_PATH) is None:
            return f"the program {program!r} is not there; on Debian, apt install {package}"
    if os.geteuid():
        return "an sshd for root needs root"
    return why_unavailable()


class SshHosts:
    """Hosts a to c with an sshd each, and one more, the head, on which launchers run.

    Args:
        folder: for keys and configuration, and the directory in which all commands run.
    """

    names = "abc"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network(*self.names)
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._namespaces = {os.stat(self.network.entrance(name)).st_ino: name for name in (HEAD, *self.names)}
        try:
            self._make_keys()
            for name in self.names:
                self._start_server(name)
        except BaseException:
            self.close()
            raise

    def run(self, *arguments: str, **options: Any) -> tuple[int, bytes, bytes]:
        """Run a ``shoal`` command on the head to its end: exit code, stdout, stderr."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a ``shoal`` command on the head, with pipes unless told otherwise."""
        settings: dict[str, Any] = {
            "cwd": self.folder,
            "env": self.environment(),
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
        }
        with self.network.inside(HEAD):
            process = subprocess.Popen([sys.executable, "-m", "shoal", *arguments], **settings | options)
        self._started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        """That of commands on the head: nothing that the user of the tests has set for shoal."""
        found = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_") and k != "OMP_NUM_THREADS"}
        found["SHOAL_SSH"] = f"ssh -F {shlex.quote(str(self.folder / 'ssh_config'))}"
        if paths := os.environ.get("PYTHONPATH"):
            found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        return found

    # -- who runs where ------------------------------------------------------------------------

    def processes(self, host: str) -> dict[int, str]:
        """The processes on a host but its sshd, with their command lines; what is dead does not count."""
        found = {}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if self._namespaces.get(os.stat(f"/proc/{pid}/ns/net").st_ino) != host:
                    continue
                process = psutil.Process(pid)
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found[pid] = shlex.join(process.cmdline()) or process.name()
        server = self._servers.get(host)
        if server is not None:
            found.pop(server.pid, None)
        return found

    def find(self, host: str, *words: str) -> int:
        """The process on a host whose command line has these words."""

        def one() -> int:
            found = [pid for pid, line in self.processes(host).items() if all(word in line for word in words)]
            return min(found, default=0)

        return until(one, lambda: self.processes(host))

    def await_empty(self, hosts: Sequence[str] = (HEAD, *"abc")) -> None:
        """Wait until nothing of a job is left on these hosts."""

        def left() -> dict[str, dict[int, str]]:
            return {host: found for host in hosts if (found := self.processes(host))}

        until(lambda: not left(), left)

    def await_agents_end(self, host: str) -> None:
        """Wait until no agent, rank or guardian is left on a host; an sshd that is cut off stays."""

        def left() -> dict[int, str]:
            return {pid: line for pid, line in self.processes(host).items() if not line.startswith("'sshd")}

        until(lambda: not left(), left)

    def await_told(self, *names: object) -> None:
        """Wait until ranks have told these things."""
        files = [self.folder / f"told-{name}" for name in names]
        until(
            lambda: all(file.exists() for file in files),
            lambda: [file for file in files if not file.exists()],
            patience=LONG,
        )

    def close(self) -> None:
        """End what runs there, then the hosts."""
        for process in (*self._started, *self._servers.values()):
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._servers.clear()
        self.network.heal()
        for host in (HEAD, *self.names):
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.network.close()

    # -- inside --------------------------------------------------------------------------------

    def _make_keys(self) -> None:
        for name in ("host_key", "user_key"):
            command = [
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                name,
                "-f",
                str(self.folder / name),
            ]
            subprocess.run(command, check=True, capture_output=True)
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known, config = [], []
        for name in self.names:
            address = self.network.address(name)
            known.append(f"{address} {public}\n")
            config.append(_SSH.format(name=name, address=address, port=_PORT, folder=self.folder))
        (self.folder / "known_hosts").write_text("".join(known))
        (self.folder / "ssh_config").write_text("".join(config))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as Debian's sshd wants it

    def _start_server(self, name: str) -> None:
        # In another home the shell has no files to read that take long, or leave a lock when they are killed.
        environment = f"HOME={self.folder}"
        if python_path := self.environment().get("PYTHONPATH"):
            environment += f" PYTHONPATH={python_path}"
        address = self.network.address(name)
        path = self.folder / f"sshd_{name}"
        path.write_text(
            _SSHD.format(port=_PORT, address=address, folder=self.folder, environment=environment)
        )
        program = shutil.which("sshd", path=_PATH)
        assert program is not None
        with self.network.inside(name), open(self.folder / f"sshd_{name}.log", "wb") as log:
            self._servers[name] = subprocess.Popen(
                [program, "-D", "-e", "-f", str(path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0),
            )  # fmt: skip

            def listens() -> bool:
                with socket.socket() as probe:
                    return probe.connect_ex((address, _PORT)) == 0

            until(listens, lambda: (self.folder / f"sshd_{name}.log").read_text())


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Hosts for a block; everything is gone afterwards."""
    hosts = SshHosts(folder)
    try:
        yield hosts
    finally:
        hosts.close()
