"""The first host of a Slurm node list, without a call to ``scontrol``."""

from __future__ import annotations


def first_host(nodelist: str) -> str:
    """The first host that ``nodelist`` names, as ``scontrol show hostnames`` would print it.

    ``"node[003-007,9],login1"`` gives ``"node003"``; a name may have several brackets
    (``"rack[1-2]n[05,07]"`` gives ``"rack1n05"``), and zeros in front are kept.

    Raises:
        ValueError: the list is empty or a bracket is not closed.
    """
    name, depth, first = "", 0, ""
    for character in nodelist.strip():
        if character == "[" and depth == 0:
            depth, first = 1, ""
        elif character == "]" and depth == 1:
            # "003-007,9": the first range's lower end, with its zeros
            depth, name = 0, name + first.split(",")[0].split("-")[0]
        elif depth == 1:
            first += character
        elif character == ",":
            break
        else:
            name += character
    if depth or not name or "]" in name:
        raise ValueError(f"not a Slurm node list: {nodelist!r}")
    return name
