"""The hosts of a job and their slots: ``--hosts`` and ``--hostfile``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError

#: names of this machine, which needs no ssh
LOCAL = ("localhost", "127.0.0.1", "[::1]")
#: maximum number of slots of a host
_MAX_SLOTS = 1 << 20

_NAME = r"(?:[A-Za-z0-9_][\w.+-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])"
_COLON = re.compile(rf"({_NAME})(?::([0-9]+))?", re.ASCII)
_LINE = re.compile(rf"({_NAME})\s+slots\s*=\s*([0-9]+)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host of the command line.

    Attributes:
        name: ``user@name``, or an address; an IPv6 address is in brackets.
        slots: number of slots.
        first: number of its first slot in the job.
    """

    name: str
    slots: int
    first: int

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL

    @property
    def destination(self) -> str:
        """The destination for ssh, which does not accept brackets; it never looks like an option."""
        user, at, name = self.name.rpartition("@")
        return user + at + name.strip("[]")

    def initial_ranks(self, size: int) -> int:
        """The number of initial ranks of a job of ``size`` ranks on this host."""
        return max(0, min(size - self.first, self.slots))

    def __contains__(self, slot: int) -> bool:
        return self.first <= slot < self.first + self.slots


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``h1:4,h2:4``; a host without a number has one slot.

    UsageError: an entry is not a host; ssh could take it for an option.
    """
    return _placed([_entry(each.strip(), "--hosts") for each in text.split(",")], "--hosts")


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file with lines ``h1 slots=4`` or ``h1:4``; ``#`` begins a comment.

    UsageError: the file cannot be read, or a line is not a host.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from error
    where = f"--hostfile {path}"
    entries = []
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            entries.append(_entry(text, f"{where}, line {number}"))
    return _placed(entries, where)


def _entry(text: str, where: str) -> tuple[str, int]:
    found = _COLON.fullmatch(text) or _LINE.fullmatch(text)
    if found is None or len(text) > 300:
        raise UsageError(f"{where}: {text[:80]!r} is not a host: expected name:4, or name slots=4 in a file")
    slots = 1 if found[2] is None else int(found[2]) if len(found[2]) < 9 else _MAX_SLOTS + 1
    if not 1 <= slots <= _MAX_SLOTS:
        raise UsageError(f"{where}: {text[:80]!r}: expected 1 to {_MAX_SLOTS} slots")
    return found[1], slots


def _placed(entries: Sequence[tuple[str, int]], where: str) -> list[Host]:
    if not entries:
        raise UsageError(f"{where} lists no hosts")
    hosts: list[Host] = []
    for name, slots in entries:
        if any(host.name == name for host in hosts):
            raise UsageError(f"{where} lists {name} twice: list it once, with all its slots")
        hosts.append(Host(name, slots, sum(host.slots for host in hosts)))
    return hosts
