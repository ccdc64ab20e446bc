"""The native functions for data-parallel training.  Only this file of the folder imports ``_core``."""

from __future__ import annotations

from .. import _core

#: Alignment of a gradient's memory, in bytes.
ALIGNMENT: int = _core.BUCKET_ALIGNMENT

#: Distributes gradients over buckets (``cpp/ddp/assignment.h``).
assign_buckets = _core.assign_buckets

#: The state machine of a backward pass (``cpp/ddp/pass.h``).
Pass = _core.Pass

#: ``Pass`` uses this number instead of a bucket's for the outcome of a pass.
OUTCOME: int = _core.OUTCOME

#: What ``Pass.mark`` returns.
Mark = _core.Mark

#: What ``Pass.finish`` returns.
PassEnd = _core.PassEnd

#: Makes a hook that copies a gradient into its bucket (``cpp/python/ddp.cc``).
gradient_hook = _core.gradient_hook

#: Whether the concatenated values of all dictionaries are identical (``is``) to the given objects.
values_are = _core.values_are

_any_pass = Pass([(0,)], [1])

#: Number of elements of ``Pass.tail``.
TAIL_ELEMENTS = len(_any_pass.tail())

#: Number of elements of ``Pass.flags`` before those of the parameters.
HEAD_FLAGS = len(_any_pass.flags([False])) - 1
