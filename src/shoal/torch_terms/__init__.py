"""Torch's API vocabulary, shared by ``shoal.distributed`` and ``shoal.compat``.

=====================  ======================================================================
``arguments``          timeouts (timedeltas, seconds, "no timeout") and reductions
``work``               the methods common to both ``Work`` classes
``aliased_outputs``    lists of outputs that share memory
``coalesced``          one operation on several tensors, with one future
=====================  ======================================================================

No module here imports torch.distributed: torch's values are recognised by name and number.
"""

#: The name of the backend in torch.distributed.
BACKEND = "shoal"
