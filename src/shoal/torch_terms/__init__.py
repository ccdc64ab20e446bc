"""The meaning of torch.distributed's words in shoal, for both ``shoal.distributed`` and ``shoal.compat``.

=====================  ======================================================================
``durations``          timedeltas and torch's ways to say "no timeout"
``reductions``         torch's ``ReduceOp`` and its spellings
``work``               the methods that both kinds of ``Work`` have
``in_turn``            lists of outputs that share memory
``coalesced``          one operation on several tensors, with one future
=====================  ======================================================================

Nothing here imports torch.distributed: torch's values are known by their names and numbers.
"""

#: The name by which torch.distributed knows the backend.
BACKEND = "shoal"
