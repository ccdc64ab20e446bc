"""The state of a session: its parts, checkpoints, and the transfer to processes that join."""
