"""Calls and references: the caller's half, the callee's half, and the objects that workers hold."""
