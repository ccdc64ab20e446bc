"""The decorator ``async_execution``, under the module name that torch uses."""

from .calls.serving import async_execution

__all__ = ["async_execution"]
