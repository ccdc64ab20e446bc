"""The parts of the native module that data-parallel training uses; no other file of the folder imports it."""

from __future__ import annotations

from .. import _core

#: A gradient's memory starts at a multiple of this many bytes.
ALIGNMENT: int = _core.BUCKET_ALIGNMENT

#: Distributes gradients over buckets (``cpp/reducer/assignment.h``).
assign_buckets = _core.assign_buckets

#: Records which gradients of a pass have arrived, and which buckets may be sent.
Readiness = _core.Readiness

#: Makes the hook of a gradient, which copies it into its bucket (``cpp/bind/reducer.cc``).
gradient_hook = _core.gradient_hook

#: Whether the values of all dictionaries, one after another, are these very objects.
values_are = _core.values_are

__all__ = ["ALIGNMENT", "Readiness", "assign_buckets", "gradient_hook", "values_are"]
