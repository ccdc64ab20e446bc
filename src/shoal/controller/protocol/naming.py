"""The names of master and nodes as workers of :mod:`shoal.rpc`."""

import secrets

MASTER = "master"


def node_name(index: int) -> str:
    """Return the name of node `index` in errors, whichever process it is."""
    return f"node{index}"


def worker_name(what: str) -> str:
    """Return a unique name for this process as a worker, beginning with `what`."""
    return f"{what}-{secrets.token_hex(4)}"
