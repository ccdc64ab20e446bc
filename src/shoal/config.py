"""The environment variables that shoal reads, with typed access.

    from shoal import config

    config.TIMEOUT.get()      # -> 300.0 unless SHOAL_TIMEOUT is set
    config.secret()           # -> the job's secret, b"" if there is none

A variable that is set to the empty string counts as not set.  ``docs/environment.md`` contains
:func:`markdown_table`; a test compares the two.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from .errors import ConfigurationError, UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: name of the environment variable.
        expected: description of the legal values, for error messages.
        parse: converts the text to the value; raises ``ValueError`` for an illegal text.
        default: the value if the variable is not set.
        description: description for the documentation.
    """

    name: str
    expected: str
    parse: Callable[[str], T]
    default: T
    description: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value in ``environ`` (default: ``os.environ``), or the default.

        Raises:
            ConfigurationError: the text is not a legal value; the message names the variable.
        """
        text = self._text(os.environ if environ is None else environ)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigurationError(f"{self.name}={text!r}: expected {self.expected}") from None

    def is_set(self) -> bool:
        """Whether the variable is set in the environment of this process."""
        return bool(self._text(os.environ))

    def _text(self, environ: Mapping[str, str]) -> str:
        return environ.get(self.name, "").strip()


def _whole(minimum: int, maximum: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
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
    """Parse a number of bytes, optionally with a unit: 1048576, 64M, 2G (powers of 1024)."""
    units = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    unit = units.get(text[-1].lower())
    value = int(text) if unit is None else int(text[:-1]) * unit
    if value <= 0:
        raise ValueError(text)
    return value


def _descriptor(text: str) -> tuple[int, int]:
    """Parse ``7:4026``: a descriptor, and the inode of its file."""
    fd, inode = map(int, text.split(":"))
    if fd < 0 or inode < 0:
        raise ValueError(text)
    return fd, inode


def job_name(text: str) -> str:
    """Return ``text`` if it is a legal name of a job, which is part of keys and messages.

    Raises:
        ValueError: it is not legal.
    """
    if not text.isprintable() or not 1 <= len(text.encode()) <= _MAX_JOB_NAME:
        raise ValueError(text)
    return text


_MAX_JOB_NAME = 256
#: Description of the names that :func:`job_name` accepts.
JOB_NAME = f"1 to {_MAX_JOB_NAME} bytes of printable text"

_RANK = "a whole number from 0"
_COUNT = "a whole number from 1"
_SECONDS = "a positive number of seconds"
_INHERITED = "a descriptor and its inode, such as 7:4026"

RANK: Variable[int | None] = Variable(
    "SHOAL_RANK", _RANK, _whole(0), None,
    "Rank of this process in the job. Not set: ranks are assigned in order of arrival.",
)  # fmt: skip
SIZE: Variable[int | None] = Variable(
    "SHOAL_SIZE", _COUNT, _whole(1), None,
    "Number of processes in the job. Not set: it is read from the job's record in the store.",
)  # fmt: skip
LOCAL_RANK: Variable[int | None] = Variable(
    "SHOAL_LOCAL_RANK", _RANK, _whole(0), None,
    "Rank among the processes that the launcher started on this host.",
)  # fmt: skip
LOCAL_SIZE: Variable[int | None] = Variable(
    "SHOAL_LOCAL_SIZE", _COUNT, _whole(1), None,
    "Number of processes that the launcher started on this host.",
)  # fmt: skip
STORE: Variable[str | None] = Variable(
    "SHOAL_STORE", "a URL such as tcp://127.0.0.1:29400", str, None,
    "URL of the job's store: `tcp://host:port`, `file:///path`, `etcd://host:port`, `redis://host:port`, or "
    "a registered scheme. Not set: a group of one.",
)  # fmt: skip
STORE_USER: Variable[str | None] = Variable(
    "SHOAL_STORE_USER", "any text", str, None,
    "User name for a store that requires one, such as `etcd://` or `redis://`, if its URL has none.",
)  # fmt: skip
STORE_PASSWORD: Variable[str | None] = Variable(
    "SHOAL_STORE_PASSWORD", "any text", str, None,
    "Password of that user, if the URL has none. Unlike a URL on a command line, other users cannot see it.",
)  # fmt: skip
JOB: Variable[str] = Variable(
    "SHOAL_JOB", JOB_NAME, job_name, "default",
    "Name of the job; it separates the keys of jobs in one store. `shoal.init(job=...)` overrides it.",
)  # fmt: skip
EPOCH: Variable[int] = Variable(
    "SHOAL_EPOCH", _RANK, _whole(0), 0,
    "Incarnation of the job, incremented by a restart; keys and connections of older ones are rejected.",
)  # fmt: skip
JOIN: Variable[bool | str] = Variable(
    "SHOAL_JOIN", "0, 1 or auto", _join, False,
    "1: this process has no rank, and joins a running session of `shoal.elastic`; `shoal run --respawn` and "
    "`--spares` set it. `auto`: the same, but it starts a session if none is running.",
)  # fmt: skip
SESSION_SIZE: Variable[int | None] = Variable(
    "SHOAL_SESSION_SIZE", _COUNT, _whole(1), None,
    "Maximum number of ranks of a session of `shoal.elastic` without `max_size=`; further processes wait as "
    "spares. `shoal run --spares` sets it, and `shoal scale` changes it. Not set: no maximum.",
)  # fmt: skip
SECRET: Variable[str | None] = Variable(
    "SHOAL_SECRET", "any text", str, None,
    "The job's secret, which authenticates every connection.",
)  # fmt: skip
SECRET_FILE: Variable[str | None] = Variable(
    "SHOAL_SECRET_FILE", "the path of a readable file", str, None,
    "File with the job's secret; read if `SHOAL_SECRET` is not set.",
)  # fmt: skip
TLS: Variable[bool] = Variable(
    "SHOAL_TLS", "0 or 1", _flag, False,
    "1: encrypt connections to stores of shoal with TLS 1.3. Must be the same for all processes of a job. "
    "`--tls` of `shoal run` and `shoal store` sets it. Tensors and calls of `shoal.rpc` are not encrypted.",
)  # fmt: skip
TLS_CA: Variable[str | None] = Variable(
    "SHOAL_TLS_CA", "the path of a PEM file", str, None,
    "With `SHOAL_TLS=1`: certificate authority (CA) that must have signed the certificate of the other side. "
    "Not set: temporary certificates, authenticated by the secret.",
)  # fmt: skip
TLS_CERT: Variable[str | None] = Variable(
    "SHOAL_TLS_CERT", "the path of a PEM file", str, None,
    "With `SHOAL_TLS_CA`: certificate of this process, valid for servers and clients, with its chain.",
)  # fmt: skip
TLS_KEY: Variable[str | None] = Variable(
    "SHOAL_TLS_KEY", "the path of a PEM file", str, None,
    "With `SHOAL_TLS_CA`: private key of that certificate, without a password.",
)  # fmt: skip
SSH: Variable[str] = Variable(
    "SHOAL_SSH", "a program and its options, such as ssh -F file", str, "ssh",
    "Program that `shoal run --hosts` calls like ssh, with options, the host and a command.",
)  # fmt: skip
REPORT_FD: Variable[tuple[int, int] | None] = Variable(
    "SHOAL_REPORT_FD", _INHERITED, _descriptor, None,
    "Descriptor on which this process reports failures to its launcher; `shoal run` sets it.",
)  # fmt: skip
PYTHON: Variable[str | None] = Variable(
    "SHOAL_PYTHON", "the path or name of a program", str, None,
    "Python with shoal, which a C++ program starts for its rendezvous; `shoal run` sets it. Not set: the one "
    "that CMake found, or `python3`.",
)  # fmt: skip
CONNECT: Variable[bool] = Variable(
    "SHOAL_CONNECT", "0 or 1", _flag, False,
    "1: the launcher starts the helper process of each rank that is a C++ program; `shoal run --connect` "
    "sets it.",
)  # fmt: skip
HELPER_FD: Variable[tuple[int, int] | None] = Variable(
    "SHOAL_HELPER_FD", _INHERITED, _descriptor, None,
    "Socket of that helper process; `shoal run --connect` sets it.",
)  # fmt: skip
HOST_ID: Variable[str | None] = Variable(
    "SHOAL_HOST_ID", "any text", str, None,
    "Overrides the identity of the host: with different values one machine counts as several hosts.",
)  # fmt: skip
INTERFACE: Variable[str | None] = Variable(
    "SHOAL_INTERFACE", "an address or host name of this host", str, None,
    "Address that this process listens on. Not set: loopback, or the address on the route to the store.",
)  # fmt: skip
TIMEOUT: Variable[float] = Variable(
    "SHOAL_TIMEOUT", _SECONDS, _seconds, 300.0,
    "Default timeout in seconds of a rendezvous, a store request or an operation.",
)  # fmt: skip
CONCURRENCY: Variable[int] = Variable(
    "SHOAL_CONCURRENCY", _COUNT, _whole(1), 1,
    "Number of lanes of a group: the maximum number of its operations in progress at once.",
)  # fmt: skip
MAX_PROGRESS_THREADS = 64
PROGRESS_THREADS: Variable[int] = Variable(
    "SHOAL_PROGRESS_THREADS", f"a whole number from 1 to {MAX_PROGRESS_THREADS}",
    _whole(1, MAX_PROGRESS_THREADS), 1,
    "Number of threads of each set of connections that run the lanes for which no thread waits.",
)  # fmt: skip
ALGORITHMS = ("auto", "direct", "doubling", "halving", "ring")
ALGORITHM: Variable[str] = Variable(
    "SHOAL_ALGORITHM", "auto, direct, doubling, halving or ring", _choice(*ALGORITHMS), "auto",
    "Algorithm of a group's reductions and all_gather between hosts, see docs/algorithms.md; `auto`: by size "
    "and number of hosts. Must be the same for all processes of a job.",
)  # fmt: skip
BACKEND: Variable[str] = Variable(
    "SHOAL_BACKEND", "the name of a backend", str, "native",
    "Backend of groups for which the program names none: `native`, `mpi`, `nccl`, or a registered one. Also "
    "for the backend `shoal` of torch.distributed.",
)  # fmt: skip
MPI_REDUCTIONS: Variable[str] = Variable(
    "SHOAL_MPI_REDUCTIONS", "native or mpi", _choice("native", "mpi"), "native",
    "Reductions of the backend `mpi`: by shoal (`native`), with the bits of the native backend, or by the "
    "MPI library (`mpi`), in its own order.",
)  # fmt: skip
TRANSPORT: Variable[str] = Variable(
    "SHOAL_TRANSPORT", "auto, shm or tcp", _choice("auto", "shm", "tcp"), "auto",
    "Transport between ranks on one host: shared memory (`shm`), sockets (`tcp`), or the best one (`auto`).",
)  # fmt: skip
HEARTBEAT_TIMEOUT: Variable[float] = Variable(
    "SHOAL_HEARTBEAT_TIMEOUT", _SECONDS, _seconds, 5.0,
    "Seconds of silence after which another host counts as lost, and after which a master treats a node that "
    "a signal has stopped as lost.",
)  # fmt: skip
VOTE_TIMEOUT: Variable[float] = Variable(
    "SHOAL_VOTE_TIMEOUT", _SECONDS, _seconds, 10.0,
    "Seconds after the first vote of an agreement until ranks that have not voted are evicted.",
)  # fmt: skip
QUORUM: Variable[str] = Variable(
    "SHOAL_QUORUM", "majority or any", _choice("majority", "any"), "majority",
    "Ranks that may decide while lost ranks may still be running: more than half of the group, or half of it "
    "with the store (`majority`); or any part of the group, so that two parts may go on separately (`any`).",
)  # fmt: skip
SHARED_MEMORY_LIMIT: Variable[int | None] = Variable(
    "SHOAL_SHARED_MEMORY_LIMIT", "a positive number of bytes such as 1073741824 or 1G", _bytes, None,
    "Maximum shared memory of this process for groups, in bytes (K, M, G and T are powers of 1024).",
)  # fmt: skip
RPC_TIMEOUT: Variable[float] = Variable(
    "SHOAL_RPC_TIMEOUT", _SECONDS, _seconds, 60.0,
    "Default timeout in seconds of a call to another worker.",
)  # fmt: skip
RPC_MEMORY: Variable[int] = Variable(
    "SHOAL_RPC_MEMORY", "a positive number of bytes such as 1073741824 or 1G", _bytes, 2**30,
    "Maximum number of bytes of large parts (over 256 KiB) of calls that an agent of `shoal.rpc` holds "
    "unhandled or keeps memory for, and of those that it lends, in shared memory, to workers of its host.",
)  # fmt: skip
CONTROLLER: Variable[str] = Variable(
    "SHOAL_CONTROLLER", "async or sync", _choice("async", "sync"), "async",
    "Whether a master goes on while nodes compute (`async`), or waits for each operation, so that an error "
    "is raised at its line (`sync`).",
)  # fmt: skip
RECORDER_SIZE: Variable[int] = Variable(
    "SHOAL_RECORDER_SIZE", _RANK, _whole(0), 2048,
    "Number of operations that the flight recorder keeps; 0 turns it off.",
)  # fmt: skip
SUMMARY: Variable[bool] = Variable(
    "SHOAL_SUMMARY", "0 or 1", _flag, False,
    "Whether this process reports to its launcher what it did, and for whom it waited, when it closes its "
    "groups; `shoal run --summary` sets it.",
)  # fmt: skip
DUMP_DIR: Variable[str | None] = Variable(
    "SHOAL_DUMP_DIR", "the path of a directory", str, None,
    "Directory in which every rank writes a file when a group fails, with the error, the latest operations, "
    "and the stacks of all threads.",
)  # fmt: skip
TRACE: Variable[str | None] = Variable(
    "SHOAL_TRACE", "the path of a directory", str, None,
    "Directory in which every rank writes a trace of its operations, for Perfetto and `shoal trace merge`.",
)  # fmt: skip

#: all variables, in the order of the documentation
VARIABLES: tuple[Variable[object], ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Variable)
)

_PREFIX = "SHOAL_"
#: bytes
_MAX_SECRET_FILE = 1 << 20
#: unknown variables for which a warning was issued
_warned: set[str] = set()


def check_variables(environ: Mapping[str, str]) -> None:
    """Check the values of all variables.

    Raises:
        ConfigurationError: a value is illegal, or contradicts another one.
    """
    for variable in VARIABLES:
        variable.get(environ)
    tls_files(environ)


def check_environment() -> None:
    """Check all variables before any is used, so that a mistake is found at the start of a job.

    An unknown variable that begins with ``SHOAL_`` is a warning, once per process.

    Raises:
        ConfigurationError: a value is illegal, or contradicts another one.
    """
    check_variables(os.environ)
    for name, near in unknown_variables(os.environ).items():
        if name in _warned:
            continue
        _warned.add(name)
        known = ", ".join(variable.name for variable in VARIABLES)
        warnings.warn(
            f"the environment variable {name} is unknown to shoal and is ignored; "
            + (f"did you mean {near}?" if near else f"the known variables are {known}"),
            stacklevel=3,
        )


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the unknown variables that begin with ``SHOAL_``, each with the known one that it resembles."""
    known = [variable.name.removeprefix(_PREFIX) for variable in VARIABLES]
    found: dict[str, str | None] = {}
    for name in sorted(environ):
        word = name.removeprefix(_PREFIX)
        if word != name and word not in known:
            near = difflib.get_close_matches(word, known, 1)
            found[name] = _PREFIX + near[0] if near else None
    return found


def encoded_secret(secret: str | bytes) -> bytes:
    """Return the argument ``secret`` of a function as bytes; UsageError if it is neither text nor bytes."""
    if isinstance(secret, str):
        return secret.encode("utf-8", "surrogateescape")  # os.environ contains bytes that are not UTF-8 so
    if not isinstance(secret, bytes):
        raise UsageError(f"secret: expected str or bytes, not {type(secret).__name__}")
    return secret


def secret(environ: Mapping[str, str] | None = None) -> bytes:
    """The job's secret: ``SHOAL_SECRET``, or the content of the file ``SHOAL_SECRET_FILE``, or ``b""``.

    White space around it is removed, so a file may end in a newline.

    Raises:
        ConfigurationError: the file cannot be read, is not a regular file, or is empty.
    """
    text = SECRET.get(environ)
    if text is not None:
        return encoded_secret(text)
    path = SECRET_FILE.get(environ)
    if path is None:
        return b""
    try:
        value = read_file(path, _MAX_SECRET_FILE).strip()
    except OSError as error:
        raise ConfigurationError(
            f"{SECRET_FILE.name}={path!r} cannot be read: {error.strerror or error}"
        ) from None
    if not value:
        raise ConfigurationError(f"{SECRET_FILE.name}={path!r}: the file is empty, expected a secret")
    return value


def read_file(path: str | Path, limit: int) -> bytes:
    """Read a regular file; raise OSError if it is a FIFO or a device, or has more than ``limit`` bytes."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def writable_directory(variable: Variable[str | None]) -> Path | None:
    """The directory that a variable names, created if needed; None if the variable is not set.

    Raises:
        ConfigurationError: the directory cannot be created, or written to.
    """
    given = variable.get()
    if given is None:
        return None
    path = Path(given)
    try:
        make_writable(path)
    except OSError as error:
        raise ConfigurationError(
            f"{variable.name}={given!r}: files cannot be created there: {error.strerror}; name a directory "
            "that this user may write to"
        ) from None
    return path


def make_writable(directory: Path) -> None:
    """Create a directory if needed; raise OSError if that fails, or if it cannot be written to."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        reason = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(reason, os.strerror(reason), str(directory))


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the files of a user-defined certificate authority."""

    ca: str
    cert: str
    key: str


def tls_files(environ: Mapping[str, str] | None = None) -> TlsFiles | None:
    """The certificates that the environment names; None if it names none.

    Raises:
        ConfigurationError: it does not name all of them, or ``SHOAL_TLS`` is not set.
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
            f"{', '.join(found)} are set, but {TLS.name} is not: set it to 1 for encryption, or to 0"
        )
    return TlsFiles(*paths)


def markdown_table() -> str:
    """The table of all variables for ``docs/environment.md``."""
    lines = ["| variable | value | default | meaning |", "| --- | --- | --- | --- |"]
    for variable in VARIABLES:
        default = "not set" if variable.default is None else f"`{variable.default}`"
        lines.append(f"| `{variable.name}` | {variable.expected} | {default} | {variable.description} |")
    return "\n".join(lines) + "\n"
