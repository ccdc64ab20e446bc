"""The names that master and nodes have as workers of :mod:`shoal.rpc`."""

MASTER = "master"


def node_name(index: int) -> str:
    """The worker that is node ``index``."""
    return f"node{index}"
