"""torch.distributed.rpc over shoal, for code that cannot be edited.

    import shoal.compat.rpc

    shoal.compat.rpc.install()               # before other modules take names out of torch.distributed.rpc
    torch.distributed.rpc.init_rpc("worker0", rank=0, world_size=2)

Torch's Python stays: ``init_rpc``, ``rpc_sync``, ``shutdown`` and the rest are its own.  What is replaced is
the C++ that they call, by functions of the same names: they come from ``calls`` (a call, and what runs at its
other end), ``reference`` (the class of references), ``lifecycle`` (beginning, end, settings) and ``waiting``
(torch's functions for several futures).  ``packing`` has the pickles, ``state`` the agent.
"""

from .installing import install, uninstall

__all__ = ["install", "uninstall"]
