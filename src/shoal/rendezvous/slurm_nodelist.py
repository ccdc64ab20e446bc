"""Parsing of Slurm's lists of nodes and counts, without a call of ``scontrol``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

#: upper bounds of the number of nodes of a job and of the length of a host name
_MAX_NODES, _MAX_NAME_LENGTH = 1 << 16, 255

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


def first_host(nodelist: str) -> str:
    """Return the first host that ``nodelist`` names, as ``scontrol show hostnames`` would print it.

    ``"node[003-007,9],login1"`` gives ``"node003"``; a name may have several brackets
    (``"rack[1-2]n[05,07]"`` gives ``"rack1n05"``), and leading zeros are kept.

    Raises:
        ValueError: the list is empty or a bracket is not closed.
    """
    return next(_hosts(nodelist))


def hosts_of(nodelist: str) -> list[str]:
    """Return all hosts that ``nodelist`` names, in order; raises as :func:`first_host`.

    ``"rack[1-2]n[05,07]"`` gives ``rack1n05``, ``rack1n07``, ``rack2n05`` and ``rack2n07``.
    """
    found = list(itertools.islice(_hosts(nodelist), _MAX_NODES + 1))
    if len(found) > _MAX_NODES:
        raise ValueError(f"more than {_MAX_NODES} hosts: {nodelist[:80]!r}")
    return found


def counts_of(text: str) -> list[int]:
    """Return the counts of ``"2(x3),1"``, one for each node: 2, 2, 2, 1. ValueError: not such a list."""
    found: list[int] = []
    for each in text.strip().split(","):
        match = _COUNT.fullmatch(each)
        times = int(match[2] or 1) if match is not None else 0
        if match is None or len(found) + times > _MAX_NODES:
            raise ValueError(f"not a list of Slurm's counts: {text[:80]!r}")
        found += [int(match[1])] * times
    return found


def _hosts(nodelist: str) -> Iterator[str]:
    for entry in _entries(nodelist):
        parts = [[literal] if literal else _numbers(inside, nodelist) for literal, inside in entry]
        for words in itertools.product(*parts):
            name = "".join(words)
            if _NAME.fullmatch(name) is None or len(name) > _MAX_NAME_LENGTH:
                raise _not_a_list(nodelist)
            yield name


def _entries(nodelist: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the entries as pairs of text and content of brackets: ``("node", ""), ("", "1-2")``."""
    entry: list[tuple[str, str]] = []
    for match in re.finditer(r"([^\[\],]+)|\[([^\[\]]+)\]|(,)|(.)", nodelist.strip(), re.DOTALL):
        if match[4] is not None:
            raise _not_a_list(nodelist)
        if match[3] is None:
            entry.append((match[1] or "", match[2] or ""))
            continue
        if not entry:
            raise _not_a_list(nodelist)
        yield entry
        entry = []
    if not entry:
        raise _not_a_list(nodelist)
    yield entry


def _numbers(inside: str, nodelist: str) -> list[str]:
    """Expand ``003-005,9`` to 003, 004, 005 and 9."""
    found: list[str] = []
    for each in inside.split(","):
        match = _RANGE.fullmatch(each)
        if match is None:
            raise _not_a_list(nodelist)
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or len(found) + high - low >= _MAX_NODES:
            raise _not_a_list(nodelist)
        found += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return found


def _not_a_list(nodelist: str) -> ValueError:
    return ValueError(f"not a Slurm node list: {nodelist[:80]!r}")
