"""The processes of nodes: how they start, join, and forward their output."""
