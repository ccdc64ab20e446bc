"""The parts of the native module that data-parallel training uses; no other file of the folder imports it."""

from __future__ import annotations

from .. import _core

#: A gradient's memory starts at a multiple of this many bytes.
ALIGNMENT: int = _core.BUCKET_ALIGNMENT

#: Distributes gradients over buckets (``cpp/reducer/assignment.h``).
assign_buckets = _core.assign_buckets

#: The state machine of a backward pass (``cpp/reducer/pass.h``).
Pass = _core.Pass

#: Stands for the outcome of a pass where ``Pass`` names a bucket.
OUTCOME: int = _core.OUTCOME

#: What ``Pass.mark`` returns.
Mark = _core.Mark

#: What ``Pass.finish`` returns.
PassEnd = _core.PassEnd

#: Makes the hook of a gradient, which copies it into its bucket (``cpp/bind/reducer.cc``).
gradient_hook = _core.gradient_hook

#: Whether the values of all dictionaries, one after another, are these very objects.
values_are = _core.values_are
