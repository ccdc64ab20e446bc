"""Checks of the arguments of operations."""
