"""Machines for programs that go from host to host by name: launchers of clusters, and their daemons.

    with Network("a", "b") as network, Machines(network, folder) as machines:
        with machines.start("a", ["srun", "-N", "2", "hostname"]) as program: ...

A :class:`~shoal.testing.Network` gives each host addresses of its own; here it gets a host name too, and a
file of hosts in which all find one another.  All programs are in one PID namespace, which the kernel ends as
a whole: daemons and what they start are gone with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from shoal.testing import Network
from shoal.testing.network import STORE, why_unavailable

from .waiting import PATIENCE, until

#: seconds for programs whose ranks import torch, on a machine that does much else
LONG = 4 * PATIENCE
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
#: first of all processes; reaps the others, as it ignores that they end, and ends with its input
_INIT = "trap '' CHLD; echo ready; exec cat"
_BE_HOST = 'hostname "$0" && exec "$@"'
#: where Debian has the daemons
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@functools.cache
def why_none(*programs: str) -> str:
    """Why there can be no machines with these programs, in words; empty if there can."""
    for program in ("unshare", "nsenter", *programs):
        if shutil.which(program, path=PATH) is None:
            return f"the program {program!r} is not there"
    return why_unavailable()


class Machines:
    """The hosts of a network, with their names.

    Args:
        network: lives at least as long.
        folder: for what they share; every host sees the files of this one.
        domain: hosts have a second name, with this behind a dot.
    """

    def __init__(self, network: Network, folder: Path, domain: str = "local") -> None:
        self.hosts = (STORE, *network.hosts)
        self._folder = folder
        names = [f"{network.address(host)} {host} {host}.{domain}" for host in self.hosts]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        lines = [f"mount --bind {folder}/hosts /etc/hosts"]
        for host in self.hosts:
            (folder / f"net-{host}").touch()
            lines.append(f"mount --no-canonicalize --bind {network.entrance(host)} {folder}/net-{host}")
        lines.append('exec unshare --pid --fork --kill-child --mount-proc sh -c "$INIT"')
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(lines)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PATH": PATH, "INIT": _INIT},
            preexec_fn=_end_with_parent,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"ready\n":
            self.close()
            raise OSError("no namespace for the programs of the hosts")
        self._init = psutil.Process(self._keeper.pid).children()[0].pid

    def command(self, host: str, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """``command`` on ``host``, as a command of this process."""
        into = ["nsenter", "--target", str(self._init), "--pid", "--mount"]
        return [*into, *self._hop(host), *map(str, command)]

    @property
    def remote_shell(self) -> Path:
        """A program that stands for ssh on the hosts: ``HOST COMMAND...`` runs a shell's command there."""
        script = self._folder / "remote-shell"
        if not script.exists():
            words = " ".join(map(shlex.quote, self._hop("$HOST"))).replace("$HOST", "'\"$host\"'")
            script.write_text(f'#!/bin/sh\nhost=$1\nshift\nexec {words} sh -c "$*"\n')
            script.chmod(0o755)
        return script

    def _hop(self, host: str) -> list[str]:
        return ["nsenter", f"--net={self._folder}/net-{host}", "unshare", "--uts", "sh", "-c", _BE_HOST, host]

    @contextlib.contextmanager
    def start(
        self,
        host: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        folder: Path | None = None,
    ) -> Iterator[Program]:
        """Run a program on ``host`` for the block; then it is killed.

        Args:
            environment: beside that of this process.
            output: what it says is appended there; None: :meth:`Program.end` returns it.
            folder: where it runs.
        """
        with contextlib.ExitStack() as steps:
            log = subprocess.PIPE if output is None else steps.enter_context(output.open("ab"))
            place = ["env", f"--chdir={folder or self._folder}", "--unset=PYTHONDONTWRITEBYTECODE"]
            process = steps.enter_context(
                subprocess.Popen(
                    self.command(host, [*place, *command]), stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, env={**os.environ, **(environment or {}), "PATH": PATH},
                    text=True, preexec_fn=_end_with_parent,
                )
            )  # fmt: skip
            program = Program(process)
            steps.callback(program.kill)
            yield program

    def run(
        self,
        host: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = LONG,
    ) -> tuple[int, str]:
        """Run a program on ``host``: its exit code, and what it said."""
        with self.start(host, command, environment=environment) as program:
            return program.end(timeout)

    def close(self) -> None:
        """End all programs."""
        assert self._keeper.stdin is not None
        self._keeper.kill()
        self._keeper.wait()
        self._keeper.stdin.close()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Program:
    """A program on a host.  Between it and this process is one that waits for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals, *, deep: bool = False) -> None:
        """Send the program a signal; ``deep``: it only waits for the one that is meant."""
        until(lambda: self.ended or psutil.Process(self._process.pid).children(recursive=deep)[-1:])
        if not self.ended:
            for child in psutil.Process(self._process.pid).children(recursive=deep)[-1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)

    def end(self, timeout: float = LONG) -> tuple[int, str]:
        """Wait for the end: the exit code, and what the program said."""
        try:
            said, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            self.kill()
            said, _ = self._process.communicate()
            raise AssertionError(f"not over after {timeout:g} s; it said:\n{said}") from error
        return self._process.returncode, said

    def kill(self) -> None:
        """End the program without a warning."""
        if not self.ended:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self._process.kill()


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
