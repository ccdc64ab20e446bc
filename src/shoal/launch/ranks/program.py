"""The program of a ``shoal run`` command line."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from ...errors import LaunchError


def resolve(command: Sequence[str], *, module: bool, python: str = "", elsewhere: bool = False) -> list[str]:
    """The argument vector that every rank executes.

    Args:
        command: the words after the options: a target and its arguments.
        module: the target is a module, run as by ``python -m``.
        python: the interpreter; "": that of this process.
        elsewhere: the command runs in another directory, so files are not looked up here: the target is a
            ``.py`` file or a program.

    The target is, in this order: a module with ``-m``; a ``.py`` file, a directory or any file that is not
    executable, run by the interpreter; an executable file; the name of a program on ``PATH``.

    Raises:
        LaunchError: there is no such target.
    """
    target, *arguments = command
    python = python or sys.executable
    if module:
        return [python, "-m", target, *arguments]
    if elsewhere:
        return [python, target, *arguments] if target.endswith(".py") else [target, *arguments]
    if os.path.exists(target):
        if os.path.isfile(target) and not target.endswith(".py") and os.access(target, os.X_OK):
            return [os.path.abspath(target), *arguments]
        return [python, target, *arguments]
    if os.path.dirname(target) or target.endswith(".py"):
        raise LaunchError(f"{target}: no such script or program")
    program = shutil.which(target)
    if program is None:
        raise LaunchError(f"{target}: no such script, nor a program on PATH (a module needs -m)")
    return [program, *arguments]


def flaw_of_script(program: str, environment: Mapping[str, str]) -> str:
    """Why the interpreter in the first line of a script cannot run it; "": no reason was found.

    The kernel and ``env`` only report that a file does not exist.
    """
    try:
        with open(program, "rb") as file:
            line = file.read(256).partition(b"\n")[0]
    except OSError:
        return ""
    words = line[2:].split()
    if not line.startswith(b"#!") or not words:
        return ""
    if line.endswith(b"\r"):
        return (
            "its first line ends with CRLF, and the carriage return becomes part of the interpreter's name; "
            f"remove carriage returns: sed -i 's/\\r$//' {program}"
        )
    interpreter, *arguments = map(os.fsdecode, words)
    if not os.path.exists(interpreter):
        return f"its first line names the interpreter {interpreter}, which does not exist"
    name = arguments[0] if arguments and os.path.basename(interpreter) == "env" else ""
    is_name = name and not name.startswith("-") and "=" not in name
    if is_name and shutil.which(name, path=environment.get("PATH")) is None:
        return f"its first line names the interpreter {name}, which is not on PATH"
    return ""


def reason_of(error: Exception, program: str) -> str:
    """Why ``program`` could not be executed."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    if error.errno == errno.ENOEXEC:
        return f"{reason}: it is a script without a #! line, or a program for another processor"
    if error.errno == errno.ENOENT and os.path.exists(program):
        return f"{reason}: the program exists, but not the loader that it names in its ELF header"
    return reason
