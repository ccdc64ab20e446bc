"""The master-worker mode: one script controls tensors on many nodes, asynchronously, as a torch device.

    master = shoal.init_master_worker(workers=4)
    x = torch.full((20, 20), 4.0, device="node:0")
    print((x + 1).sum().item())

See ``docs/controller.md``.
"""

from .api.explain import Explanation
from .api.master import Master, init_master_worker
from .api.place import Place
from .api.streams import Event, Stream
from .api.trace import Trace
from .tensor.tensor import RemoteTensor

__all__ = ["Event", "Explanation", "Master", "Place", "RemoteTensor", "Stream", "Trace", "init_master_worker"]
