"""Calls of functions of ``probes`` in child processes, where a library may raise, crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ...common.formatting import encodable, format_seconds, signal_name

#: seconds in which a child must return; importing torch from a slow file system takes tens of seconds
TIMEOUT_S = 90.0
#: seconds to read the rest of a killed child's output
_KILLED_TIMEOUT_S = 5.0
#: maximum length of an error
_MAX_ERROR = 600

#: libraries print to stdout, so the result has a descriptor of its own; prctl: the child dies with its parent
_PROGRAM = """
import ctypes, json, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
sys.path[:], name, arguments = json.loads(sys.argv.pop())
sys.argv[:] = ["shoal", "doctor"]
result = os.dup(1)
os.dup2(2, 1)
from shoal.tools.doctor import probes
with open(result, "w", encoding="utf-8") as file:
    json.dump(getattr(probes, name)(*arguments), file)
"""


class ChildFailed(Exception):
    """A child process raised, was killed, or did not return in time; the text has the reason."""


class ProbeProcess:
    """A running function of :mod:`~shoal.tools.doctor.probes`; a context manager that kills it.

    Args:
        name, arguments: the function; its arguments and its result are converted to JSON.
        environ: environment of the process; None: that of this process.
    """

    def __init__(self, name: str, *arguments: object, environ: Mapping[str, str] | None = None) -> None:
        if not sys.executable:
            raise ChildFailed("the path of the Python interpreter is unknown (sys.executable is empty)")
        call = json.dumps([sys.path, name, arguments])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, call],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ChildFailed(f"no process could be started: {error.strerror or error}") from None

    def result(self, timeout: float) -> Any:
        """Return the result of the function.

        Raises:
            ChildFailed: there is none.
        """
        try:
            out, err = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"no result within {format_seconds(timeout)}") from None
        code = self._process.returncode
        if code == 0:
            with contextlib.suppress(ValueError):
                return json.loads(out)
        text = err.decode(errors="backslashreplace").strip()
        if code < 0:
            text = f"the process was killed by {signal_name(-code)}. {_last_line(text)}".strip()
        raise ChildFailed(_last_line(text) or f"the process exited with code {code} and without a result")

    def close(self) -> None:
        """Kill the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired, OSError, ValueError):
            self._process.communicate(timeout=_KILLED_TIMEOUT_S)

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(name: str, *arguments: object, environ: Mapping[str, str] | None = None) -> Any:
    """Run a function of :mod:`~shoal.tools.doctor.probes` in a child process and return its result.

    Raises:
        ChildFailed: there is none.
    """
    with ProbeProcess(name, *arguments, environ=environ) as child:
        return child.result(TIMEOUT_S)


def _last_line(text: str) -> str:
    """The exception at the end of a traceback, on one line."""
    lines = text.splitlines()
    begin = next((number for number in reversed(range(len(lines))) if lines[number][:1] not in ("", " ")), 0)
    return encodable(" ".join(" ".join(lines[begin:]).split()))[:_MAX_ERROR]
