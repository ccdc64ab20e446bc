"""``shoal bench``: collectives called from Python, shoal beside its peers and the machine's limits.

A coordinator (:mod:`.command`, :mod:`.race`) starts each contender's ranks once (:mod:`.contenders`,
:mod:`.running`) and gives them work in turns; a rank (:mod:`.ranks`) waits for orders, checks the result
of an operation, and measures it.  What a run leaves behind is a :class:`.result.BenchResult`, from which
tables, pictures and README's section are made.
"""
