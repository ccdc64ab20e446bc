"""Every environment variable that shoal reads, in one table, with typed access.

    from shoal import config

    config.TIMEOUT.get()      # -> 300.0 unless SHOAL_TIMEOUT says otherwise
    config.secret()           # -> the job's secret, b"" when there is none

A variable that is set to the empty string counts as not set.  ``docs/environment.md`` is
:func:`markdown_table`; a test compares the two.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from .errors import ConfigurationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: of the environment variable.
        kind: the legal values, in words; part of every error about the variable.
        parse: turns the text into the value; raises ``ValueError`` for text that makes no sense.
        default: the value while the variable is not set.
        meaning: one sentence for the documentation.
    """

    name: str
    kind: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The value in ``environ`` (the process's environment unless given), or the default.

        Raises:
            ConfigurationError: the text is not a legal value; the message names the variable.
        """
        text = self._text(os.environ if environ is None else environ)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigurationError(f"{self.name}={text!r}: expected {self.kind}") from None

    def is_set(self) -> bool:
        """Whether the process's environment has a value."""
        return bool(self._text(os.environ))

    def _text(self, environ: Mapping[str, str]) -> str:
        return environ.get(self.name, "").strip()


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError(text)
        return value

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def _choice(*options: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in options:
            raise ValueError(text)
        return text.lower()

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _join(text: str) -> bool | str:
    return text if text == "auto" else _flag(text)


def _bytes(text: str) -> int:
    """A number of bytes, optionally with a unit: 1048576, 64M, 2G (powers of 1024)."""
    units = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    unit = units.get(text[-1].lower())
    value = int(text) if unit is None else int(text[:-1]) * unit
    if value <= 0:
        raise ValueError(text)
    return value


def _descriptor(text: str) -> tuple[int, int]:
    """``7:4026``: a descriptor, and the inode of the file that it stands for."""
    fd, inode = map(int, text.split(":"))
    if fd < 0 or inode < 0:
        raise ValueError(text)
    return fd, inode


def job_name(text: str) -> str:
    """``text`` itself, if it can name a job: it becomes part of keys, and of every message about the job.

    Raises:
        ValueError: it cannot.
    """
    if not text.isprintable() or not 1 <= len(text.encode()) <= _LONGEST_JOB:
        raise ValueError(text)
    return text


_LONGEST_JOB = 256
#: The names that :func:`job_name` takes, in words.
JOB_NAME = f"1 to {_LONGEST_JOB} bytes of printable text"

_RANK = "a whole number from 0"
_COUNT = "a whole number from 1"
_SECONDS = "a positive number of seconds"

RANK: Variable[int | None] = Variable(
    "SHOAL_RANK", _RANK, _at_least(0), None,
    "Rank of this process in the job. Not set: ranks are given out in order of arrival.",
)  # fmt: skip
SIZE: Variable[int | None] = Variable(
    "SHOAL_SIZE", _COUNT, _at_least(1), None,
    "Number of processes in the job. Not set: it stands in the job's record in the store.",
)  # fmt: skip
LOCAL_RANK: Variable[int | None] = Variable(
    "SHOAL_LOCAL_RANK", _RANK, _at_least(0), None,
    "Rank among the processes that the launcher started on this host.",
)  # fmt: skip
LOCAL_SIZE: Variable[int | None] = Variable(
    "SHOAL_LOCAL_SIZE", _COUNT, _at_least(1), None,
    "Number of processes that the launcher started on this host.",
)  # fmt: skip
STORE: Variable[str | None] = Variable(
    "SHOAL_STORE", "a URL such as tcp://127.0.0.1:29400", str, None,
    "Where the processes meet: `tcp://host:port`, `file:///path`, `etcd://host:port`, `redis://host:port`, "
    "or a registered scheme. Not set: a group of one.",
)  # fmt: skip
STORE_USER: Variable[str | None] = Variable(
    "SHOAL_STORE_USER", "any text", str, None,
    "User of a store on a server that asks for one, such as `etcd://` or `redis://`, where its URL names "
    "none.",
)  # fmt: skip
STORE_PASSWORD: Variable[str | None] = Variable(
    "SHOAL_STORE_PASSWORD", "any text", str, None,
    "Password of that user, where the store's URL holds none: other users of a host see command lines.",
)  # fmt: skip
JOB: Variable[str] = Variable(
    "SHOAL_JOB", JOB_NAME, job_name, "default",
    "Name of the job; keys of different jobs on one store do not meet. `shoal.init(job=...)` overrides it.",
)  # fmt: skip
EPOCH: Variable[int] = Variable(
    "SHOAL_EPOCH", _RANK, _at_least(0), 0,
    "Incarnation of the job; a restart counts it up, and nothing of an older one is accepted.",
)  # fmt: skip
JOIN: Variable[bool | str] = Variable(
    "SHOAL_JOIN", "0, 1 or auto", _join, False,
    "1: this process has no rank, and joins the ranks of a running session of `shoal.elastic`; `shoal run "
    "--respawn` and `--spares` set it. `auto`: the same, and it begins the session where none runs.",
)  # fmt: skip
SESSION_SIZE: Variable[int | None] = Variable(
    "SHOAL_SESSION_SIZE", _COUNT, _at_least(1), None,
    "How many ranks a session of `shoal.elastic` takes, but for one with `max=`: who comes then waits as a "
    "spare. `shoal run --spares` sets it, and `shoal scale` changes it. Not set: as many as come.",
)  # fmt: skip
SECRET: Variable[str | None] = Variable(
    "SHOAL_SECRET", "any text", str, None,
    "The job's secret: every connection proves that it knows it.",
)  # fmt: skip
SECRET_FILE: Variable[str | None] = Variable(
    "SHOAL_SECRET_FILE", "the path of a readable file", str, None,
    "File that holds the job's secret; read when `SHOAL_SECRET` is not set.",
)  # fmt: skip
TLS: Variable[bool] = Variable(
    "SHOAL_TLS", "0 or 1", _flag, False,
    "1: connections to stores of shoal are encrypted, with TLS 1.3; the same for every process of the job. "
    "`--tls` of `shoal run` and `shoal store` sets it. Tensors and calls of `shoal.rpc` are not encrypted.",
)  # fmt: skip
TLS_CA: Variable[str | None] = Variable(
    "SHOAL_TLS_CA", "the path of a PEM file", str, None,
    "With `SHOAL_TLS=1`: the authority that must have signed the certificate of whoever is at the other end. "
    "Not set: certificates are made at the start, and the secret vouches for them.",
)  # fmt: skip
TLS_CERT: Variable[str | None] = Variable(
    "SHOAL_TLS_CERT", "the path of a PEM file", str, None,
    "With `SHOAL_TLS_CA`: the certificate of this process, for servers and clients, and what links it to the "
    "authority.",
)  # fmt: skip
TLS_KEY: Variable[str | None] = Variable(
    "SHOAL_TLS_KEY", "the path of a PEM file", str, None,
    "With `SHOAL_TLS_CA`: the key of that certificate, without a password.",
)  # fmt: skip
SSH: Variable[str] = Variable(
    "SHOAL_SSH", "a program and its options, such as ssh -F file", str, "ssh",
    "What `shoal run --hosts` runs to reach a host: called as ssh is, with options, the host and a command.",
)  # fmt: skip
REPORT_FD: Variable[tuple[int, int] | None] = Variable(
    "SHOAL_REPORT_FD", "a descriptor and its inode, such as 7:4026", _descriptor, None,
    "Where this process tells its launcher of its own failure; `shoal run` sets it.",
)  # fmt: skip
HOST_ID: Variable[str | None] = Variable(
    "SHOAL_HOST_ID", "any text", str, None,
    "Takes the place of the host's own identity: different values make one machine look like several.",
)  # fmt: skip
INTERFACE: Variable[str | None] = Variable(
    "SHOAL_INTERFACE", "an address or host name of this host", str, None,
    "Address that this process listens on. Not set: loopback, or the one that leads to the store.",
)  # fmt: skip
TIMEOUT: Variable[float] = Variable(
    "SHOAL_TIMEOUT", _SECONDS, _seconds, 300.0,
    "Seconds until a rendezvous, a store request or an operation without a timeout of its own fails.",
)  # fmt: skip
CONCURRENCY: Variable[int] = Variable(
    "SHOAL_CONCURRENCY", _COUNT, _at_least(1), 1,
    "Lanes of a group: how many of its operations may be in progress at once.",
)  # fmt: skip
TRANSPORT: Variable[str] = Variable(
    "SHOAL_TRANSPORT", "auto, shm or tcp", _choice("auto", "shm", "tcp"), "auto",
    "How ranks on one host talk: shared memory (`shm`), sockets (`tcp`), or the best there is (`auto`).",
)  # fmt: skip
HEARTBEAT_TIMEOUT: Variable[float] = Variable(
    "SHOAL_HEARTBEAT_TIMEOUT", _SECONDS, _seconds, 5.0,
    "Seconds of silence after which another host counts as lost, and after which a master gives up a node "
    "that a signal has stopped.",
)  # fmt: skip
VOTE_TIMEOUT: Variable[float] = Variable(
    "SHOAL_VOTE_TIMEOUT", _SECONDS, _seconds, 10.0,
    "Seconds after the first vote of an agreement after which ranks that have not voted are left out.",
)  # fmt: skip
QUORUM: Variable[str] = Variable(
    "SHOAL_QUORUM", "majority or any", _choice("majority", "any"), "majority",
    "Who may decide while ranks are lost that may live: more than half of the group, or half of it and the "
    "store (`majority`); or any part of it, so that two parts may go on apart (`any`).",
)  # fmt: skip
SHARED_MEMORY_LIMIT: Variable[int | None] = Variable(
    "SHOAL_SHARED_MEMORY_LIMIT", "a positive number of bytes such as 1073741824 or 1G", _bytes, None,
    "Most shared memory that this process may take for groups, in bytes (K, M, G and T are powers of 1024).",
)  # fmt: skip
RPC_TIMEOUT: Variable[float] = Variable(
    "SHOAL_RPC_TIMEOUT", _SECONDS, _seconds, 60.0,
    "Seconds until a call to another worker without a timeout of its own fails.",
)  # fmt: skip
RPC_MEMORY: Variable[int] = Variable(
    "SHOAL_RPC_MEMORY", "a positive number of bytes such as 1073741824 or 1G", _bytes, 2**30,
    "Most bytes of large parts (over 256 KiB) of calls that an agent of `shoal.rpc` holds unhandled or keeps "
    "memory for, and most that it lends, in shared memory, to workers of its host.",
)  # fmt: skip
CONTROLLER: Variable[str] = Variable(
    "SHOAL_CONTROLLER", "async or sync", _choice("async", "sync"), "async",
    "Whether a master goes on while nodes compute. With `sync` each operation is waited for, and what fails "
    "raises at its line.",
)  # fmt: skip
RECORDER_SIZE: Variable[int] = Variable(
    "SHOAL_RECORDER_SIZE", _RANK, _at_least(0), 2048,
    "Number of the latest operations that the flight recorder keeps; 0 turns it off.",
)  # fmt: skip
DUMP_DIR: Variable[str | None] = Variable(
    "SHOAL_DUMP_DIR", "the path of a directory", str, None,
    "Where every rank writes a file when a group fails: the error, the latest operations, "
    "every thread's stack.",
)  # fmt: skip

#: every variable, in the order of the documentation
VARIABLES: tuple[Variable[object], ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Variable)
)

_PREFIX = "SHOAL_"
#: unknown variables that the user was told of
_warned: set[str] = set()


def check_values(environ: Mapping[str, str]) -> None:
    """Look at the value of every variable.

    Raises:
        ConfigurationError: the text of one is not a legal value, or it makes no sense beside the others.
    """
    for variable in VARIABLES:
        variable.get(environ)
    tls_files(environ)


def check(environ: Mapping[str, str] | None = None) -> None:
    """Look at every variable before any is used, so that a mistake shows wherever a job starts.

    A variable that begins with ``SHOAL_`` and means nothing is a warning, once in a process.

    Raises:
        ConfigurationError: the text of one is not a legal value.
    """
    table = os.environ if environ is None else environ
    check_values(table)
    known = [variable.name.removeprefix(_PREFIX) for variable in VARIABLES]
    for name in sorted(table):
        word = name.removeprefix(_PREFIX)
        if word == name or word in known or name in _warned:
            continue
        _warned.add(name)
        near = difflib.get_close_matches(word, known, 1)
        warnings.warn(
            f"the environment variable {name} means nothing to shoal and is ignored; "
            + (
                f"{_PREFIX}{near[0]} is meant, probably"
                if near
                else f"those that it reads are {', '.join(_PREFIX + word for word in known)}"
            ),
            stacklevel=3,
        )


def secret(environ: Mapping[str, str] | None = None) -> bytes:
    """The job's secret: ``SHOAL_SECRET``, or what the file ``SHOAL_SECRET_FILE`` holds, or ``b""``.

    White space around it is dropped, so a file may end in a newline.

    Raises:
        ConfigurationError: the file cannot be read, or holds nothing.
    """
    text = SECRET.get(environ)
    if text is not None:
        return text.encode()
    path = SECRET_FILE.get(environ)
    if path is None:
        return b""
    try:
        value = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"{SECRET_FILE.name}={path!r} cannot be read: {error.strerror or error}"
        ) from None
    if not value:
        raise ConfigurationError(f"{SECRET_FILE.name}={path!r}: the file is empty, expected a secret")
    return value


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of the files of an authority of one's own."""

    ca: str
    cert: str
    key: str


def tls_files(environ: Mapping[str, str] | None = None) -> TlsFiles | None:
    """The certificates that the environment names, None if it names none.

    Raises:
        ConfigurationError: it names some of them only, or nothing says whether they are to be used.
    """
    found = {variable.name: variable.get(environ) for variable in (TLS_CA, TLS_CERT, TLS_KEY)}
    paths = [path for path in found.values() if path]
    if not paths:
        return None
    if len(paths) < len(found):
        given = [name for name, path in found.items() if path]
        raise ConfigurationError(f"{', '.join(given)} set without the others of {', '.join(found)}")
    if not TLS._text(os.environ if environ is None else environ):
        raise ConfigurationError(
            f"{', '.join(found)} are set, but nothing is encrypted without {TLS.name}=1; set it, or to 0"
        )
    return TlsFiles(*paths)


def markdown_table() -> str:
    """The table of all variables for ``docs/environment.md``."""
    lines = ["| variable | value | default | meaning |", "| --- | --- | --- | --- |"]
    for variable in VARIABLES:
        default = "not set" if variable.default is None else f"`{variable.default}`"
        lines.append(f"| `{variable.name}` | {variable.kind} | {default} | {variable.meaning} |")
    return "\n".join(lines) + "\n"
