"""Checks of the environment variables of shoal and of its launcher, and of the job's secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

from ... import config
from ...common.formatting import counted
from ...errors import ConfigurationError, UsageError
from ...rendezvous.launcher_variables import Launch, read
from ...store.external.url import redacted
from ..findings import Finding, fail, ok, warn

#: a secret that cannot be guessed: the digits of 64 random bits
_LEAST_SECRET = 16
_SET_SECRET = (
    "set the same SHOAL_SECRET=$(openssl rand -hex 16) for every process, or start the job with `shoal run`"
)
_SECRET_NAMES = (config.SECRET.name, config.STORE_PASSWORD.name)


def variables() -> list[Finding]:
    """The variables that begin with SHOAL_: each illegal, contradicting or unknown one."""
    environ = os.environ
    found = []
    for variable in config.VARIABLES:
        try:
            variable.get(environ)
        except ConfigurationError as error:
            found.append(fail(str(error), f"correct or unset {variable.name}"))
    try:
        config.tls_files(environ)
    except ConfigurationError as error:
        if not any(config.TLS.name in each.fact for each in found):
            found.append(fail(str(error), f"set all of these variables and {config.TLS.name}, or none"))
    for name, near in config.unknown_variables(environ).items():
        found.append(warn(
            f"{name} is unknown to shoal and is ignored",
            f"rename it to {near}, if you mean that" if near else "unset it, or correct its name",
        ))  # fmt: skip
    if found:
        return found
    names = [variable.name for variable in config.VARIABLES if variable.is_set()]
    shown = [name if name in _SECRET_NAMES else f"{name}={redacted(os.environ[name])}" for name in names]
    return [ok("set: " + ", ".join(shown) if shown else "no variable SHOAL_* is set")]


def dump_directory() -> Finding:
    """The directory of SHOAL_DUMP_DIR."""
    return _directory(config.DUMP_DIR, "dumps")


def trace_directory() -> Finding:
    """The directory of SHOAL_TRACE."""
    return _directory(config.TRACE, "traces")


def _directory(variable: config.Variable[str | None], files: str) -> Finding:
    given = variable.get(os.environ)
    if given is None:
        return ok(f"{variable.name} is not set: ranks write no {files}")
    path = Path(given)
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        # An attempt, because root's permissions do not count on each file system.
        with TemporaryDirectory(prefix="shoal-doctor-", dir=existing):
            return ok(f"{files} are written to {given!r}")
    except OSError as error:
        return fail(
            f"{variable.name}={given!r} cannot be written to: {error.strerror}",
            "name a directory that this user can write to",
        )


def launch() -> Launch | None:
    """The launch that the variables describe; None without a launcher, or if they are wrong."""
    try:
        return read(os.environ)
    except ConfigurationError:
        return None


def launcher() -> Finding:
    """The launcher's variables: rank, size, and where the ranks meet."""
    try:
        found = read(os.environ)
    except ConfigurationError as error:
        return fail(str(error), "correct these variables, or start the job with `shoal run`")
    if found is None:
        return ok("no launcher has started this process: `shoal.init()` makes a group of one")
    rank = "a rank by arrival" if found.rank is None else f"rank {found.rank}"
    size = "the size from the store" if found.size is None else f"size {found.size}"
    place = "a private file of this host" if found.url is None else redacted(found.url)
    return ok(f"started by {found.launcher}: {rank}, {size}, job {found.job!r}, ranks meet at {place}")


def has_several_hosts() -> bool:
    """Whether the launcher has started ranks on several hosts, or pods, which are hosts."""
    found = launch()
    if found is None or found.size == 1:
        return False
    if found.launcher == "Kubernetes":
        return True
    return None not in (found.size, found.local_size) and found.size != found.local_size


def secret() -> Finding:
    """The job's secret: its source, its length, and who can read it."""
    try:
        value = config.secret()
    except UsageError as error:
        return fail(str(error), f"correct {config.SECRET_FILE.name}, or {_SET_SECRET}")
    if not value:
        if has_several_hosts():
            return fail("no secret is set, and the job has several hosts", _SET_SECRET)
        return ok("no secret is set: enough for ranks of one user on one host")
    if config.SECRET.is_set():
        source = config.SECRET.name
    else:
        path = Path(config.SECRET_FILE.get() or "")
        source = str(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            return warn(
                f"others can read the secret in {path} (mode {mode:o})" if mode & 0o044
                else f"others can change the secret in {path} (mode {mode:o})",
                f"chmod 600 {path}, or in Kubernetes defaultMode: 0400 of the volume",
            )  # fmt: skip
    if len(value) < _LEAST_SECRET:
        return warn(f"the secret from {source} has only {counted(len(value), 'byte')}", _SET_SECRET)
    return ok(f"the secret is set by {source}")
