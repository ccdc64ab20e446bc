"""Calls and references: the caller, the callee, and remote objects with their holders."""
