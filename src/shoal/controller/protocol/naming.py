"""The names that master and nodes have as workers of :mod:`shoal.rpc`."""

import secrets

MASTER = "master"


def node_name(index: int) -> str:
    """The node ``index`` in errors, whichever process it is."""
    return f"node{index}"


def worker_name(what: str) -> str:
    """The name of this process as a worker, which no other has and none has had."""
    return f"{what}-{secrets.token_hex(4)}"
