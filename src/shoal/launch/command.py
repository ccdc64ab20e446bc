"""The program that a ``shoal run`` command line means."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from ..errors import LaunchError


def resolve(command: Sequence[str], *, module: bool, python: str = "", elsewhere: bool = False) -> list[str]:
    """The argument vector that every rank executes.

    Args:
        command: what the user wrote after the options: a target and its arguments.
        module: the target is a module (``-m``), run as ``python -m`` does.
        python: the interpreter; this one unless given.
        elsewhere: the command runs in another directory, so nothing can be looked up here: the target is a
            ``.py`` file or a program.

    The target is, in this order: a module with ``-m``; a ``.py`` file, a directory or any file that
    is not executable, run by this Python; an executable file; the name of a program on ``PATH``.

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
