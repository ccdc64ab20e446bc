"""Torch's place for the decorator of handlers that return a future."""

from .calls.serving import async_execution

__all__ = ["async_execution"]
