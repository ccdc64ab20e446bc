"""The master's side of recorded steps (``master.recorded``)."""
