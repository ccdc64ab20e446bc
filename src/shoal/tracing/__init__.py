"""Traces of the operations of all groups: which rank waited for which other one, and for how long.

``shoal.trace`` and ``SHOAL_TRACE`` turn them on.  The core keeps the times of operations in memory, from
where a thread appends them to a file (:mod:`shoal.tracing.spool`).  At the end that becomes a Chrome trace
(:mod:`shoal.tracing.rank_trace`).  ``shoal trace merge`` merges those of all ranks
(:mod:`shoal.tools.traces`).

Nothing here imports torch.
"""

from .recording import trace as trace
