"""The output of ranks, and the launcher's own lines."""
