"""Torch's API vocabulary, shared by ``shoal.distributed`` and ``shoal.compat``.

=====================  ======================================================================
``durations``          timeouts: timedeltas, seconds, and torch's values for "no timeout"
``reductions``         torch's ``ReduceOp`` and its spellings
``work``               the methods common to both ``Work`` classes
``in_turn``            lists of outputs that share memory
``coalesced``          one operation on several tensors, with one future
=====================  ======================================================================

No module here imports torch.distributed: torch's values are recognised by name and number.
"""

#: The name of the backend in torch.distributed.
BACKEND = "shoal"
