"""A job of ``shoal run``: its supervisor, its processes, and what happens when one fails."""
