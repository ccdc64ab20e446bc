"""Why a node has no tensor, where the reason is not its own."""

from __future__ import annotations

#: in the place of a failure's number: the node died
LOST = -1


class Elsewhere(Exception):
    """A tensor that another node should have sent, or a collective that it takes part in, failed there.

    Attributes:
        node: where the failure is known.
        number: of it there, or LOST.
    """

    def __init__(self, node: int, number: int) -> None:
        super().__init__(f"node {node} has failed")
        self.node = node
        self.number = number


class Undelivered(Exception):
    """A tensor that another node sent did not come."""
