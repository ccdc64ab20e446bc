"""Recorded steps (``master.recorded``): the half that runs at the master."""
