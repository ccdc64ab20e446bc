"""``shoal bench``: collectives called from Python, compared with other libraries and the hardware limits.

A coordinator (:mod:`.command`, :mod:`.race`) starts each contender's ranks once (:mod:`.contenders`,
:mod:`.contender_process`) and sends them orders in turns. A rank (:mod:`.ranks`) executes an operation,
checks its result and measures it. The :class:`.result.BenchResult` of a run is the source of tables, pictures
and the section of docs/benchmark.md.
"""
