"""The log of commands that the master sends to each node, and the handling of replies."""
